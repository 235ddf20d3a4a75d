// Zstandard frames, after RFC 8878; the section of each part stands beside it.
#include <algorithm>
#include <array>
#include <bit>
#include <vector>

#include "cuda_shim/inflate.h"
#include "emulator/emulator.h"

namespace fovea::cuda_shim {
namespace {

[[noreturn]] void broken(const char* what) {
  throw emulator::Error(0, std::string("the compressed PTX is damaged: ") + what + ".");
}

void require(bool condition, const char* what) {
  if (!condition) broken(what);
}

int highest_bit(std::uint64_t value) { return 63 - std::countl_zero(value); }

// Little-endian bytes and bits from the front.
class Forward {
 public:
  explicit Forward(Bytes bytes) : bytes_(bytes) {}

  std::uint64_t number(std::size_t count) {
    std::uint64_t value = 0;
    const Bytes from = take(count);
    for (std::size_t i = 0; i < count; ++i) value |= std::uint64_t{from[i]} << (8 * i);
    return value;
  }
  Bytes take(std::size_t count) {
    require(count <= left(), "the Zstandard frame ends early");
    at_ += count;
    return bytes_.subspan(at_ - count, count);
  }
  std::size_t left() const { return bytes_.size() - at_; }
  Bytes rest() { return take(left()); }

  unsigned bits(int count) {
    unsigned value = 0;
    for (int i = 0; i < count; ++i, ++bit_) {
      require(at_ + bit_ / 8 < bytes_.size(), "a table of the Zstandard frame ends early");
      value |= static_cast<unsigned>(bytes_[at_ + bit_ / 8] >> (bit_ % 8) & 1) << i;
    }
    return value;
  }
  void unread_bit() { --bit_; }
  void align() {
    at_ += (bit_ + 7) / 8;
    bit_ = 0;
  }

 private:
  Bytes bytes_;
  std::size_t at_ = 0, bit_ = 0;
};

// Bits from the back (section 4.1.1): the highest set bit of the last byte marks the end. Bits in
// front of the first byte are zero; left() then is negative.
class Backward {
 public:
  explicit Backward(Bytes bytes) : bytes_(bytes) {
    require(!bytes.empty() && bytes.back() != 0, "a bit stream of the frame has no end mark");
    left_ = static_cast<std::int64_t>(bytes.size() - 1) * 8 + highest_bit(bytes.back());
  }
  std::int64_t left() const { return left_; }
  std::uint64_t read(int count) {
    left_ -= count;
    std::uint64_t value = 0;
    for (int done = 0; done < count;) {
      const std::int64_t bit = left_ + done;
      if (bit < 0) {
        done += static_cast<int>(std::min<std::int64_t>(-bit, count - done));
        continue;
      }
      const int within = static_cast<int>(bit % 8), take = std::min(8 - within, count - done);
      const std::uint64_t byte = bytes_[static_cast<std::size_t>(bit / 8)];
      value |= (byte >> within & ((1u << take) - 1)) << done;
      done += take;
    }
    return value;
  }
  void unread(int count) { left_ += count; }

 private:
  Bytes bytes_;
  std::int64_t left_ = 0;
};

// ---- finite state entropy (section 4.1)

struct FseCell {
  std::uint8_t symbol = 0, bits = 0;
  std::uint16_t base = 0;
};
struct FseTable {
  int log = 0;
  std::vector<FseCell> cells;
};

FseTable make_fse(int log, std::span<const int> counts) {
  const std::size_t size = std::size_t{1} << log;
  FseTable table{log, std::vector<FseCell>(size)};
  std::vector<unsigned> next(counts.size());
  std::size_t high = size;
  for (std::size_t s = 0; s < counts.size(); ++s) {
    next[s] = counts[s] < 0 ? 1 : static_cast<unsigned>(counts[s]);
    if (counts[s] < 0) table.cells[--high].symbol = static_cast<std::uint8_t>(s);
  }
  const std::size_t step = (size >> 1) + (size >> 3) + 3;
  std::size_t at = 0;
  for (std::size_t s = 0; s < counts.size(); ++s) {
    for (int i = 0; i < counts[s]; ++i) {
      table.cells[at].symbol = static_cast<std::uint8_t>(s);
      do {
        at = (at + step) & (size - 1);
      } while (at >= high);
    }
  }
  for (FseCell& cell : table.cells) {
    const unsigned state = next[cell.symbol]++;
    cell.bits = static_cast<std::uint8_t>(log - highest_bit(state));
    cell.base = static_cast<std::uint16_t>((state << cell.bits) - size);
  }
  return table;
}

// Section 4.1.1: how often each symbol occurs; -1 is "less than once".
FseTable read_fse(Forward& in, int greatest_log, std::size_t most_symbols) {
  const int log = static_cast<int>(in.bits(4)) + 5;
  require(log <= greatest_log, "an entropy table is larger than the format allows");
  int remaining = 1 << log;
  std::vector<int> counts;
  while (remaining > 0) {
    require(counts.size() < most_symbols, "an entropy table has too many symbols");
    const int bits = highest_bit(static_cast<unsigned>(remaining) + 1) + 1;
    int value = static_cast<int>(in.bits(bits));
    const int low_mask = (1 << (bits - 1)) - 1;
    const int threshold = (1 << bits) - 2 - remaining;
    if ((value & low_mask) < threshold) {
      in.unread_bit();
      value &= low_mask;
    } else if (value > low_mask) {
      value -= threshold;
    }
    const int count = value - 1;
    counts.push_back(count);
    remaining -= std::abs(count);
    if (count != 0) continue;
    for (unsigned zeros = 3; zeros == 3;) {
      zeros = in.bits(2);
      counts.insert(counts.end(), zeros, 0);
    }
  }
  require(remaining == 0 && counts.size() <= most_symbols, "an entropy table does not add up");
  in.align();
  return make_fse(log, counts);
}

class FseState {
 public:
  FseState(const FseTable& table, Backward& in)
      : table_(&table), state_(static_cast<std::size_t>(in.read(table.log))) {}
  std::uint8_t symbol() const { return table_->cells[state_].symbol; }
  void advance(Backward& in) {
    const FseCell& cell = table_->cells[state_];
    state_ = cell.base + static_cast<std::size_t>(in.read(cell.bits));
  }

 private:
  const FseTable* table_;
  std::size_t state_;
};

// ---- Huffman codes of literals (section 4.2)

struct HuffmanTable {
  int bits = 0;  // of the longest code
  struct Cell {
    std::uint8_t symbol, bits;
  };
  std::vector<Cell> cells;  // indexed by the next `bits` bits
};

std::vector<std::uint8_t> read_weights(Forward& in) {
  constexpr std::size_t most_weights = 255;
  std::vector<std::uint8_t> weights;
  const std::size_t header = in.number(1);
  if (header >= 128) {  // four bits each
    const std::size_t count = header - 127;
    const Bytes packed = in.take((count + 1) / 2);
    for (std::size_t i = 0; i < count; ++i) {
      weights.push_back(i % 2 == 0 ? packed[i / 2] >> 4 : packed[i / 2] & 15);
    }
    return weights;
  }
  Forward description(in.take(header));
  const FseTable table = read_fse(description, 6, 13);
  Backward stream(description.rest());
  FseState even(table, stream), odd(table, stream);
  for (FseState *now = &even, *other = &odd;; std::swap(now, other)) {
    weights.push_back(now->symbol());
    now->advance(stream);
    require(weights.size() < most_weights, "a Huffman table has too many symbols");
    if (stream.left() >= 0) continue;
    weights.push_back(other->symbol());
    return weights;
  }
}

HuffmanTable read_huffman(Forward& in) {
  std::vector<std::uint8_t> weights = read_weights(in);
  std::size_t sum = 0;
  for (const std::uint8_t weight : weights) {
    require(weight <= 12, "a Huffman weight is too large");
    if (weight != 0) sum += std::size_t{1} << (weight - 1);
  }
  require(sum != 0, "a Huffman table is empty");
  HuffmanTable table;
  table.bits = highest_bit(sum) + 1;
  require(table.bits <= 11, "a Huffman code is too long");
  // The last symbol takes what is left of the code space.
  const std::size_t missing = (std::size_t{1} << table.bits) - sum;
  require(std::has_single_bit(missing), "a Huffman table does not add up");
  weights.push_back(static_cast<std::uint8_t>(highest_bit(missing) + 1));
  for (int weight = 1; weight <= table.bits; ++weight) {
    for (std::size_t symbol = 0; symbol < weights.size(); ++symbol) {
      if (weights[symbol] != weight) continue;
      table.cells.insert(
          table.cells.end(), std::size_t{1} << (weight - 1),
          {static_cast<std::uint8_t>(symbol), static_cast<std::uint8_t>(table.bits + 1 - weight)});
    }
  }
  return table;
}

void read_literals(const HuffmanTable& table, Bytes bytes, std::size_t count, std::string& out) {
  Backward stream(bytes);
  for (std::size_t i = 0; i < count; ++i) {
    const HuffmanTable::Cell cell = table.cells[stream.read(table.bits)];
    stream.unread(table.bits - cell.bits);
    out.push_back(static_cast<char>(cell.symbol));
  }
  require(stream.left() == 0, "a stream of literals has another length than declared");
}

// ---- sequences (section 3.1.1.3.2)

struct LengthCode {
  std::uint32_t base;
  std::uint8_t bits;
};
constexpr std::array<LengthCode, 36> kLiteralLengths = [] {
  std::array<LengthCode, 36> codes{};
  for (std::uint32_t i = 0; i < 16; ++i) codes[i] = {i, 0};
  constexpr std::uint8_t bits[20] = {1, 1, 1, 1,  2,  2,  3,  3,  4,  6,
                                     7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
  std::uint32_t base = 16;
  for (std::size_t i = 0; i < 20; ++i) {
    codes[16 + i] = {base, bits[i]};
    base += 1u << bits[i];
  }
  return codes;
}();
constexpr std::array<LengthCode, 53> kMatchLengths = [] {
  std::array<LengthCode, 53> codes{};
  for (std::uint32_t i = 0; i < 32; ++i) codes[i] = {i + 3, 0};
  constexpr std::uint8_t bits[21] = {1, 1, 1, 1,  2,  2,  3,  3,  4,  4, 5,
                                     7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
  std::uint32_t base = 35;
  for (std::size_t i = 0; i < 21; ++i) {
    codes[32 + i] = {base, bits[i]};
    base += 1u << bits[i];
  }
  return codes;
}();
static_assert(kLiteralLengths[25].base == 64 && kLiteralLengths[35].base == 65536);
static_assert(kMatchLengths[43].base == 131 && kMatchLengths[52].base == 65539);

// The distributions of section 3.1.1.3.2.2, for blocks that bring none.
constexpr int kDefaultLiteralLengths[] = {4, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1,  1,  2,  2,
                                          2, 2, 2, 2, 2, 2, 2, 3, 2, 1, 1, 1, 1, 1, -1, -1, -1, -1};
constexpr int kDefaultMatchLengths[] = {1, 4, 3, 2, 2, 2, 2, 2, 2, 1, 1,  1,  1,  1,  1,  1,  1, 1,
                                        1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,  1,  1,  1,  1,  1,  1, 1,
                                        1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1};
constexpr int kDefaultOffsets[] = {1, 1, 1, 1, 1, 1, 2, 2, 2, 1,  1,  1,  1,  1, 1,
                                   1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1};

class Frame {
 public:
  Frame(Bytes bytes, std::size_t limit) : in_(bytes), limit_(limit) {}

  std::string inflate() {
    read_header();
    for (bool last = false; !last;) {
      const std::uint64_t header = in_.number(3);
      last = (header & 1) != 0;
      block(header >> 1 & 3, header >> 3);
      require(out_.size() <= limit_, "the Zstandard frame holds more than it declares");
    }
    return std::move(out_);
  }

 private:
  enum Field { literal_length, offset, match_length };

  // Section 3.1.1.1. The window's size is of no use: all of the output is kept.
  void read_header() {
    require(in_.number(4) == 0xFD2FB528, "a Zstandard frame does not begin with its magic number");
    const unsigned descriptor = static_cast<unsigned>(in_.number(1));
    const bool single_segment = (descriptor & 0x20) != 0;
    if (!single_segment) in_.number(1);
    constexpr std::size_t dictionary_bytes[] = {0, 1, 2, 4}, length_bytes[] = {0, 2, 4, 8};
    require(in_.number(dictionary_bytes[descriptor & 3]) == 0,
            "the Zstandard frame needs a dictionary");
    const std::size_t size_bytes = length_bytes[descriptor >> 6];
    in_.number(size_bytes == 0 && single_segment ? 1 : size_bytes);
  }

  void block(std::uint64_t type, std::size_t size) {
    switch (type) {
      case 0: {
        const Bytes raw = in_.take(size);
        out_.append(raw.begin(), raw.end());
        return;
      }
      case 1:
        require(size <= limit_, "the Zstandard frame holds more than it declares");
        out_.append(size, static_cast<char>(in_.number(1)));
        return;
      case 2: {
        Forward body(in_.take(size));
        literals(body);
        sequences(body);
        return;
      }
      default: broken("a block of the Zstandard frame has the reserved type");
    }
  }

  // Section 3.1.1.3.1.
  void literals(Forward& body) {
    literals_.clear();
    const std::uint64_t first = body.number(1);
    const unsigned type = first & 3, format = first >> 2 & 3;
    if (type < 2) {
      std::size_t size = first >> 3;
      if (format == 1) size = first >> 4 | body.number(1) << 4;
      if (format == 3) size = first >> 4 | body.number(2) << 4;
      require(size <= limit_, "the Zstandard frame holds more than it declares");
      if (type == 1) {
        literals_.assign(size, static_cast<char>(body.number(1)));
      } else {
        const Bytes raw = body.take(size);
        literals_.assign(raw.begin(), raw.end());
      }
      return;
    }
    constexpr int size_bits[] = {10, 10, 14, 18};
    constexpr std::size_t more_bytes[] = {2, 2, 3, 4};
    const int bits = size_bits[format];
    const std::uint64_t header = first | body.number(more_bytes[format]) << 8;
    const std::uint64_t mask = (std::uint64_t{1} << bits) - 1;
    const std::size_t size = header >> 4 & mask, packed = header >> (4 + bits) & mask;
    Forward streams(body.take(packed));
    if (type == 2) huffman_ = read_huffman(streams);
    require(huffman_.bits != 0, "a block uses a Huffman table before there is one");
    if (format == 0) {
      read_literals(huffman_, streams.rest(), size, literals_);
      return;
    }
    std::array<std::size_t, 3> bytes{};
    for (std::size_t& count : bytes) count = streams.number(2);
    const std::size_t quarter = (size + 3) / 4;
    require(size >= 3 * quarter, "four streams of literals are too short");
    for (const std::size_t count : bytes) {
      read_literals(huffman_, streams.take(count), quarter, literals_);
    }
    read_literals(huffman_, streams.rest(), size - 3 * quarter, literals_);
  }

  FseTable table(Field field, unsigned mode, Forward& body) {
    constexpr int greatest_log[] = {9, 8, 9}, default_log[] = {6, 5, 6};
    constexpr std::size_t symbols_of[] = {36, 32, 53};
    constexpr std::span<const int> defaults_of[] = {kDefaultLiteralLengths, kDefaultOffsets,
                                                    kDefaultMatchLengths};
    switch (mode) {
      case 0: return make_fse(default_log[field], defaults_of[field]);
      case 1: {
        const std::uint64_t symbol = body.number(1);
        require(symbol < symbols_of[field], "a sequence code is out of range");
        FseTable single{0, std::vector<FseCell>(1)};
        single.cells[0].symbol = static_cast<std::uint8_t>(symbol);
        return single;
      }
      case 2: return read_fse(body, greatest_log[field], symbols_of[field]);
      default:
        require(!tables_[field].cells.empty(), "a block repeats a table before there is one");
        return tables_[field];
    }
  }

  void sequences(Forward& body) {
    std::size_t count = body.number(1);
    if (count == 255) {
      count = body.number(2) + 0x7F00;
    } else if (count >= 128) {
      count = (count - 128) << 8 | body.number(1);
    }
    std::size_t used = 0;
    if (count != 0) {
      const unsigned modes = static_cast<unsigned>(body.number(1));
      for (const Field field : {literal_length, offset, match_length}) {
        tables_[field] = table(field, modes >> (6 - 2 * field) & 3, body);
      }
      Backward stream(body.rest());
      FseState lengths(tables_[literal_length], stream), offsets(tables_[offset], stream),
          matches(tables_[match_length], stream);
      for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t distance_value =
            (std::uint64_t{1} << offsets.symbol()) + stream.read(offsets.symbol());
        const LengthCode match = kMatchLengths[matches.symbol()];
        const std::size_t match_bytes = match.base + stream.read(match.bits);
        const LengthCode literal = kLiteralLengths[lengths.symbol()];
        const std::size_t literal_bytes = literal.base + stream.read(literal.bits);
        if (i + 1 < count) {
          lengths.advance(stream);
          matches.advance(stream);
          offsets.advance(stream);
        }
        require(stream.left() >= 0, "the sequences of a block end early");
        require(literal_bytes <= literals_.size() - used, "a block has too few literals");
        out_.append(literals_, used, literal_bytes);
        used += literal_bytes;
        copy(distance(distance_value, literal_bytes == 0), match_bytes);
      }
      require(stream.left() == 0, "the sequences of a block have another length than declared");
    }
    out_.append(literals_, used);
  }

  // Section 3.1.1.5: values up to 3 name recent distances; without literals each is one later.
  std::size_t distance(std::uint64_t value, bool no_literals) {
    if (value > 3) {
      recent_ = {value - 3, recent_[0], recent_[1]};
      return recent_[0];
    }
    const std::size_t which = value - 1 + (no_literals ? 1 : 0);
    const std::uint64_t chosen = which == 3 ? recent_[0] - 1 : recent_[which];
    if (which >= 2) recent_[2] = recent_[1];
    if (which >= 1) recent_[1] = recent_[0];
    recent_[0] = chosen;
    return chosen;
  }

  void copy(std::size_t back, std::size_t count) {
    require(back != 0 && back <= out_.size(), "a match begins before the text");
    require(count <= limit_ && out_.size() <= limit_,
            "the Zstandard frame holds more than it declares");
    // A match may run into what it is itself writing.
    for (std::size_t i = 0; i < count; ++i) out_.push_back(out_[out_.size() - back]);
  }

  Forward in_;
  std::size_t limit_;
  std::string out_, literals_;
  HuffmanTable huffman_;
  std::array<FseTable, 3> tables_;
  std::array<std::uint64_t, 3> recent_{1, 4, 8};
};

}  // namespace

std::string inflate_zstd(Bytes frame, std::size_t limit) { return Frame(frame, limit).inflate(); }

}  // namespace fovea::cuda_shim

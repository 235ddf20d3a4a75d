// LZ4 blocks: sequences of (literals, match), the last without a match.
#include "cuda_shim/inflate.h"
#include "emulator/emulator.h"

namespace fovea::cuda_shim {
namespace {

[[noreturn]] void broken(const char* what) {
  throw emulator::Error(0, std::string("the compressed PTX is damaged: ") + what + ".");
}

class Reader {
 public:
  explicit Reader(Bytes bytes) : bytes_(bytes) {}
  bool empty() const { return at_ == bytes_.size(); }
  std::uint8_t byte() {
    if (empty()) broken("the LZ4 block ends early");
    return bytes_[at_++];
  }
  // A length of four bits goes on in further bytes while they are 255.
  std::size_t length(unsigned nibble) {
    std::size_t value = nibble;
    if (nibble != 15) return value;
    std::uint8_t more = 255;
    while (more == 255) value += more = byte();
    return value;
  }
  Bytes take(std::size_t count) {
    if (count > bytes_.size() - at_) broken("the LZ4 block ends inside literals");
    at_ += count;
    return bytes_.subspan(at_ - count, count);
  }

 private:
  Bytes bytes_;
  std::size_t at_ = 0;
};

}  // namespace

std::string inflate_lz4(Bytes block, std::size_t size) {
  constexpr std::size_t shortest_match = 4;
  std::string text;
  text.reserve(size);
  Reader reader(block);
  while (!reader.empty()) {
    const unsigned token = reader.byte();
    const Bytes literals = reader.take(reader.length(token >> 4));
    text.append(literals.begin(), literals.end());
    if (reader.empty()) break;
    const std::size_t low = reader.byte();
    const std::size_t offset = low | std::size_t{reader.byte()} << 8;
    const std::size_t length = reader.length(token & 15u) + shortest_match;
    if (offset == 0 || offset > text.size()) broken("an LZ4 match begins before the text");
    if (text.size() + length > size) broken("the LZ4 block holds more than it declares");
    // A match may run into what it is itself writing.
    for (std::size_t i = 0; i < length; ++i) text.push_back(text[text.size() - offset]);
  }
  if (text.size() != size) broken("the LZ4 block holds another size than it declares");
  return text;
}

}  // namespace fovea::cuda_shim

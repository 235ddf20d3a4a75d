// Tensor and bulk copies as an H200 does them: what it stops at, where the chunks of a box land,
// what it fills with. The tables below were measured on one (driver 580.159.04), every row by a
// kernel of its own.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "emulator/emulator.h"

namespace fovea::emulator::testing {
namespace {

enum class Operation { load, store, reduce };

constexpr std::uint64_t kRowBytes = 1024;
constexpr std::uint32_t kRows = 40;
constexpr std::uint32_t kTileBytes = 8192;

// A copy of a box at `at` to or from `tile` + offset, whose 8 KiB end in `out`.
std::string kernel_text(Operation operation, int rank, std::array<int, 2> at, int offset,
                        std::uint32_t bytes) {
  const std::string dims = std::to_string(rank) + "d";
  const std::string place =
      "[map, {" + std::to_string(at[0]) + (rank == 2 ? ", " + std::to_string(at[1]) : "") + "}]";
  const std::string tile = "[tile+" + std::to_string(offset) + "]";
  std::string copy;
  if (operation == Operation::load) {
    copy =
        "mbarrier.init.shared.b64 [full], 1;\nfence.proxy.async;\n"
        "mbarrier.arrive.expect_tx.shared.b64 %d3, [full], " +
        std::to_string(bytes) + ";\ncp.async.bulk.tensor." + dims +
        ".shared::cluster.global.tile.mbarrier::complete_tx::bytes " + tile + ", " + place +
        ", [full];\n";
  } else {
    copy = (operation == Operation::store
                ? "cp.async.bulk.tensor." + dims + ".global.shared::cta"
                : "cp.reduce.async.bulk.tensor." + dims + ".global.shared::cta.add") +
           ".tile.bulk_group " + place + ", " + tile +
           ";\ncp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\n";
  }
  std::string replaced;  // "map" stands for the parameter's address
  for (std::size_t from = 0;;) {
    const std::size_t found = copy.find("[map", from);
    replaced += copy.substr(from, found - from);
    if (found == std::string::npos) break;
    replaced += "[%d1";
    from = found + 4;
  }
  return R"(.version 9.0
.target sm_90a
.address_size 64
.shared .align 1024 .b8 tile[8192];
.shared .align 8 .b64 full;
.visible .entry test(.param .u64 out, .param .align 64 .b8 map[128])
{
  .reg .pred %p<4>;
  .reg .b32 %r<8>;
  .reg .b64 %d<8>;
  ld.param.u64 %d0, [out];
  mov.b64 %d1, map;
  cvta.param.u64 %d1, %d1;
  mov.u32 %r0, %tid.x;
  shl.b32 %r1, %r0, 2;
  mov.u32 %r2, tile;
  add.u32 %r2, %r2, %r1;
FILL:
  st.shared.u32 [%r2], 0x01010101;
  add.u32 %r2, %r2, 128;
  add.u32 %r1, %r1, 128;
  setp.lt.u32 %p1, %r1, 8192;
  @%p1 bra FILL;
  fence.proxy.async;
  bar.sync 0;
  setp.ne.u32 %p0, %r0, 0;
  @%p0 bra ISSUED;
)" + replaced +
         R"(ISSUED:
  bar.sync 0;
)" +
         (operation == Operation::load ? R"(WAIT:
  mbarrier.try_wait.parity.shared.b64 %p2, [full], 0;
  @!%p2 bra WAIT;
)"
                                       : "") +
         R"(  shl.b32 %r1, %r0, 2;
  mov.u32 %r2, tile;
  add.u32 %r2, %r2, %r1;
  cvt.u64.u32 %d2, %r1;
  add.u64 %d0, %d0, %d2;
DUMP:
  ld.shared.u32 %r3, [%r2];
  st.global.u32 [%d0], %r3;
  add.u32 %r2, %r2, 128;
  add.u64 %d0, %d0, 128;
  add.u32 %r1, %r1, 128;
  setp.lt.u32 %p1, %r1, 8192;
  @%p1 bra DUMP;
  ret;
}
)";
}

struct Outcome {
  Report report;
  std::vector<std::uint8_t> tile;    // shared memory after the copy
  std::vector<std::uint8_t> matrix;  // global memory after it
};

std::uint8_t element(std::size_t i) { return static_cast<std::uint8_t>(1 + i * 7 % 251); }

TensorMapSpec matrix_map(TensorType type, std::uint32_t size, std::array<std::uint32_t, 2> box) {
  TensorMapSpec map;
  map.type = type;
  map.rank = 2;
  map.dimensions = {kRowBytes / size, kRows, 1, 1, 1};
  map.strides_bytes[0] = kRowBytes;
  map.box = {box[0] / size, box[1], 1, 1, 1};
  return map;
}

Outcome run(Operation operation, TensorMapSpec map, std::array<int, 2> at, int offset,
            std::uint32_t bytes) {
  Machine machine(chip_h200());
  Outcome outcome;
  outcome.matrix.resize(kRowBytes * kRows);
  if (operation == Operation::load) {
    for (std::size_t i = 0; i < outcome.matrix.size(); ++i) outcome.matrix[i] = element(i);
  }
  map.address = machine.allocate(outcome.matrix.size());
  machine.write(map.address, outcome.matrix.data(), outcome.matrix.size());
  const std::uint64_t out = machine.allocate(kTileBytes);
  std::array<std::byte, 192> parameters{};
  std::memcpy(parameters.data(), &out, sizeof out);
  const TensorMap encoded = encode_tensor_map(map);
  std::memcpy(parameters.data() + 64, encoded.data(), encoded.size());
  LaunchConfig config;
  config.block.x = 32;
  Schedule schedule;
  schedule.step_limit = 1u << 20;
  outcome.report =
      machine.launch(Module::parse(kernel_text(operation, map.rank, at, offset, bytes)), "test",
                     config, parameters, schedule);
  outcome.tile.resize(kTileBytes);
  machine.read(outcome.tile.data(), out, kTileBytes);
  machine.read(outcome.matrix.data(), map.address, outcome.matrix.size());
  return outcome;
}

TensorType type_of(std::uint32_t size) {
  return size == 1   ? TensorType::uint8
         : size == 2 ? TensorType::bfloat16
         : size == 4 ? TensorType::float32
                     : TensorType::float64;
}

void expect_stop(const Outcome& outcome, FaultKind kind, bool stops, const std::string& what) {
  EXPECT_EQ(outcome.report.has(kind), stops) << what;
  if (!stops) {
    for (const Fault& fault : outcome.report.faults) ADD_FAILURE() << what << ": " << fault.text();
  }
}

// "illegal instruction" on the chip, inside the tensor and out of it, whatever the element.
TEST(CopyEngine, StopsAtBoxesThatBeginBetweenSixteenBytes) {
  for (const std::uint32_t size : {1u, 2u, 4u, 8u}) {
    for (const int first : {0, 1, 2, 4, 8, 12, 16, 24, -4, -8, -16, 1020, 1032, 2048}) {
      if (first % static_cast<int>(size) != 0) continue;
      for (const Operation operation : {Operation::load, Operation::store, Operation::reduce}) {
        const Outcome outcome = run(operation, matrix_map(type_of(size), size, {16, 16}),
                                    {first / static_cast<int>(size), 3}, 0, 256);
        expect_stop(outcome, FaultKind::misaligned, first % 16 != 0,
                    std::to_string(size) + "-byte elements at byte " + std::to_string(first));
      }
    }
  }
  TensorMapSpec line = matrix_map(TensorType::float32, 4, {64, 1});
  line.rank = 1;
  for (const int first : {0, 1, 4}) {
    expect_stop(run(Operation::load, line, {first, 0}, 0, 64), FaultKind::misaligned,
                first % 4 != 0, "one dimension at " + std::to_string(first));
  }
}

// "misaligned address" on the chip.
TEST(CopyEngine, StopsAtSharedMemoryBetween128Bytes) {
  for (const Swizzle swizzle : {Swizzle::none, Swizzle::b32, Swizzle::b64, Swizzle::b128}) {
    for (const int offset : {0, 16, 32, 64, 128, 256, 512}) {
      for (const Operation operation : {Operation::load, Operation::store}) {
        TensorMapSpec map = matrix_map(TensorType::uint8, 1, {16, 16});
        map.swizzle = swizzle;
        expect_stop(run(operation, map, {16, 2}, offset, 256), FaultKind::misaligned,
                    offset % 128 != 0, "shared + " + std::to_string(offset));
      }
    }
  }
}

// Rows of 16-byte chunks, as they lay in shared memory: a swizzled row takes its whole span.
TEST(CopyEngine, PutsNarrowBoxesIntoRowsOfTheSwizzlesSpan) {
  struct Case {
    Swizzle swizzle;
    std::uint32_t width;
    std::vector<std::size_t> offsets;  // of the chunks, row by row
  };
  const Case cases[] = {
      {Swizzle::none, 48, {0, 16, 32, 48, 64, 80, 96, 112, 128}},
      {Swizzle::b32, 16, {0, 32, 64, 96, 144, 176, 208, 240, 256}},
      {Swizzle::b64, 16, {0, 64, 144, 208, 288, 352, 432, 496, 512}},
      {Swizzle::b64, 32, {0, 16, 64, 80, 144, 128, 208, 192, 288, 304, 352, 368, 432, 416}},
      {Swizzle::b64, 48, {0, 16, 32, 64, 80, 96, 144, 128, 176, 208, 192, 240, 288, 304, 256}},
      {Swizzle::b128, 16, {0, 144, 288, 432, 576, 720, 864, 1008, 1024}},
      {Swizzle::b128, 32, {0, 16, 144, 128, 288, 304, 432, 416, 576, 592, 720, 704}},
      {Swizzle::b128, 64, {0, 16, 32, 48, 144, 128, 176, 160, 288, 304, 256, 272, 432, 416}},
  };
  for (const Case& test : cases) {
    TensorMapSpec map = matrix_map(TensorType::uint8, 1, {test.width, 9});
    map.swizzle = test.swizzle;
    const Outcome loaded = run(Operation::load, map, {0, 0}, 0, 9 * test.width);
    for (const Fault& fault : loaded.report.faults) ADD_FAILURE() << fault.text();
    const std::size_t chunks = test.width / 16;
    for (std::size_t i = 0; i < test.offsets.size(); ++i) {
      const std::size_t from = i / chunks * kRowBytes + i % chunks * 16;
      for (std::size_t byte = 0; byte < 16; ++byte) {
        ASSERT_EQ(loaded.tile[test.offsets[i] + byte], element(from + byte))
            << "width " << test.width << " chunk " << i << " byte " << byte;
      }
    }
    // And back: a store takes them from there.
    const Outcome stored = run(Operation::store, map, {32, 1}, 0, 0);
    for (const Fault& fault : stored.report.faults) ADD_FAILURE() << fault.text();
    for (std::size_t i = 0; i < stored.matrix.size(); ++i) {
      const std::size_t row = i / kRowBytes, column = i % kRowBytes;
      const bool inside = row >= 1 && row < 10 && column >= 32 && column < 32 + test.width;
      ASSERT_EQ(stored.matrix[i], inside ? 1 : 0) << "row " << row << " byte " << column;
    }
  }
}

TEST(CopyEngine, FillsWithItsOwnNan) {
  for (const std::uint32_t size : {2u, 4u, 8u}) {
    TensorMapSpec map = matrix_map(type_of(size), size, {16, 4});
    map.nan_fill = true;
    const Outcome outcome =
        run(Operation::load, map, {static_cast<int>(kRowBytes / size), 0}, 0, 64);
    for (std::size_t i = 0; i < 64; ++i) {
      ASSERT_EQ(outcome.tile[i], i % 2 == 0 ? 0xf7 : 0x7f) << "byte " << i << " of " << size;
    }
  }
}

TEST(CopyEngine, StepsOverRowsButNotOverColumns) {
  TensorMapSpec map = matrix_map(TensorType::uint8, 1, {32, 16});
  map.element_strides = {2, 3, 1, 1, 1};
  const Outcome outcome = run(Operation::load, map, {0, -3}, 0, 6 * 32);
  for (const Fault& fault : outcome.report.faults) ADD_FAILURE() << fault.text();
  for (std::size_t row = 0; row < 6; ++row) {
    for (std::size_t column = 0; column < 32; ++column) {
      const int from = -3 + 3 * static_cast<int>(row);
      ASSERT_EQ(outcome.tile[32 * row + column],
                from < 0 ? 0 : element(static_cast<std::size_t>(from) * kRowBytes + column));
    }
  }
}

// The chip moves fewer bytes than were asked for where the size is no multiple of 16, and its
// barrier waits for ever; at a wrong address it stops with "misaligned address".
TEST(CopyEngine, MovesBulksOfSixteenBytesOnly) {
  struct Case {
    int bytes, shared, global;
    bool good;
  };
  for (const Case& test : {Case{256, 0, 0, true},
                           {256, 16, 16, true},
                           {0, 0, 0, true},
                           {8, 0, 0, false},
                           {24, 0, 0, false},
                           {256, 8, 0, false},
                           {256, 0, 8, false}}) {
    for (const bool load : {true, false}) {
      const std::string tile = "[tile+" + std::to_string(test.shared) + "]";
      const std::string memory = "[%d0+" + std::to_string(test.global) + "]";
      const std::string size = std::to_string(test.bytes);
      const std::string body =
          load
              ? "mbarrier.init.shared.b64 [full], 1;\nfence.proxy.async;\n"
                "mbarrier.arrive.expect_tx.shared.b64 %d1, [full], " +
                    size + ";\ncp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes " +
                    tile + ", " + memory + ", " + size +
                    ", [full];\nWAIT:\nmbarrier.test_wait.shared.b64 %p0, [full], %d1;\n"
                    "@!%p0 bra WAIT;\n"
              : "st.shared.v4.b32 [tile], {%r0, %r0, %r0, %r0};\nfence.proxy.async;\n"
                "cp.async.bulk.global.shared::cta.bulk_group " +
                    memory + ", " + tile + ", " + size +
                    ";\ncp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\n";
      Machine machine(chip_h200());
      const std::uint64_t out = machine.allocate(1024);
      Schedule schedule;
      schedule.step_limit = 1u << 16;
      const Report report = machine.launch(
          Module::parse(".version 9.0\n.target sm_90a\n.address_size 64\n"
                        ".shared .align 128 .b8 tile[512];\n.shared .align 8 .b64 full;\n"
                        ".visible .entry test(.param .u64 out)\n{\n.reg .pred %p<2>;\n"
                        ".reg .b32 %r<2>;\n.reg .b64 %d<4>;\nld.param.u64 %d0, [out];\n"
                        "mov.u32 %r0, 0;\n" +
                        body + "ret;\n}\n"),
          "test", LaunchConfig{}, std::as_bytes(std::span(&out, 1)), schedule);
      EXPECT_EQ(report.has(FaultKind::misaligned), !test.good)
          << size << " bytes, shared + " << test.shared << ", global + " << test.global;
    }
  }
}

// cuTensorMapEncodeTiled's answers.
TEST(CopyEngine, RefusesTheMapsThatTheDriverRefuses) {
  const auto takes = [](const TensorMapSpec& map) {
    try {
      encode_tensor_map(map);
      return true;
    } catch (const Error&) {
      return false;
    }
  };
  const auto base = [] {
    TensorMapSpec map = matrix_map(TensorType::uint8, 1, {16, 16});
    map.address = 1024;
    return map;
  };
  const auto with = [&](auto&& change) {
    TensorMapSpec map = base();
    change(map);
    return takes(map);
  };
  EXPECT_TRUE(with([](auto&) {}));
  for (const auto& [extent, good] :
       {std::pair{std::uint64_t{0}, false}, {1ull << 32, true}, {(1ull << 32) + 1, false}}) {
    EXPECT_EQ(with([&, e = extent](auto& m) { m.dimensions[0] = e; }), good) << extent;
  }
  for (const auto& [stride, good] : {std::pair{std::uint64_t{0}, true},
                                     {8ull, false},
                                     {128ull, true},  // rows overlap
                                     {(1ull << 40) - 16, true},
                                     {1ull << 40, false}}) {
    EXPECT_EQ(with([&, s = stride](auto& m) { m.strides_bytes[0] = s; }), good) << stride;
  }
  for (const auto& [width, good] :
       {std::pair{0u, false}, {8u, false}, {24u, false}, {256u, true}, {257u, false}}) {
    EXPECT_EQ(with([&, w = width](auto& m) { m.box[0] = w; }), good) << width;
  }
  for (const auto& [swizzle, span] :
       {std::pair{Swizzle::b32, 32u}, {Swizzle::b64, 64u}, {Swizzle::b128, 128u}}) {
    for (const std::uint32_t width : {16u, 32u, 64u, 128u, 144u}) {
      EXPECT_EQ(with([&, s = swizzle](auto& m) {
                  m.swizzle = s;
                  m.box[0] = width;
                }),
                width <= span)
          << width;
    }
  }
  for (const auto& [depth, rows, good] :
       {std::tuple{4u, 228u, true}, {4u, 229u, false}, {3u, 256u, true}, {4u, 256u, false}}) {
    EXPECT_EQ(with([&, d = depth, r = rows](auto& m) {
                m.rank = 3;
                m.dimensions[2] = 8;
                m.strides_bytes[1] = 1 << 19;
                m.box = {256, r, d, 1, 1};
              }),
              good)
        << rows << " x " << depth;
  }
  EXPECT_TRUE(with([](auto& m) { m.box[1] = 256; }));  // more rows than the tensor has
  EXPECT_FALSE(with([](auto& m) { m.address += 8; }));
  EXPECT_FALSE(with([](auto& m) { m.element_strides[0] = 9; }));
  EXPECT_FALSE(with([](auto& m) { m.element_strides[0] = 0; }));
  EXPECT_FALSE(with([](auto& m) { m.nan_fill = true; }));
  EXPECT_TRUE(with([](auto& m) {
    m.type = TensorType::float16;
    m.nan_fill = true;
  }));
}

}  // namespace
}  // namespace fovea::emulator::testing

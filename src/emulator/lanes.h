// Arithmetic over the 32 lanes of a warp, from lanes.def. Two builds of the same text exist, one of
// them with AVX2; lane_function() picks once by what the processor offers. Both give equal bits:
// multiplications and additions are never contracted and fused ones are always fused.
#pragma once

#include "emulator/numeric.h"

namespace fovea::emulator {

// Rows hold one value per lane: 32-bit rows for types up to 32 bit (upper bits zero), 64-bit rows
// for wider ones. Results are stored for lanes in `mask` only.
struct LaneArguments {
  void* d;
  const void* s[3];
  u32 mask;
  u32 immediate;
};

// Comparisons return their lane mask; all others return 0.
using LaneFunction = u32 (*)(const LaneArguments&);

enum class LaneOp : u16 {
#define UNARY(name, ...) name,
#define BINARY(name, ...) name,
#define TERNARY(name, ...) name,
#define COMPARE(name, ...) name,
#include "emulator/lanes.def"
#undef UNARY
#undef BINARY
#undef TERNARY
#undef COMPARE
  count
};

LaneFunction lane_function(LaneOp op);

// Matrix product of 32 rows: for each of `columns` outputs,
//   d[c][lane] += sum over k of a[k * 32 + lane] * b(c, k, lane)
// where b is b[(c * depth + k) * 8 + lane % 8], or with `uniform` b[c * depth + k] for all lanes.
struct ProductArguments {
  float* const* d;  // one 32-lane row per column
  const float* a;
  const float* b;
  int columns;
  int depth;
  bool uniform;
};
using ProductFunction = void (*)(const ProductArguments&);
ProductFunction product_function();

namespace baseline {
extern const LaneFunction kLaneFunctions[];
void product(const ProductArguments&);
}  // namespace baseline
namespace avx2 {
extern const LaneFunction kLaneFunctions[];
void product(const ProductArguments&);
}  // namespace avx2

}  // namespace fovea::emulator

// fovea in eight bits: operands with a scale for every 32 rows, rotated so that outliers do not
// stretch them (docs/kernels/fp8.md). Quantise once, attend many times:
//
//   const fovea::QuantizePlan quantizer = fovea::plan_quantize(problem, {});
//   fovea::Quantized codes = quantizer.operands();         // shapes and dtypes, no memory yet
//   codes.k.data = ...; codes.v.data = ...; codes.key_scale.data = ...;
//   quantizer.run(problem, codes, workspace);              // keys alone
//   ...
//   fovea::Quantized queries = quantizer.operands();       // of each step
//   queries.q.data = codes.q.data = ...; queries.q_scale.data = codes.q_scale.data = ...;
//   quantizer.run(problem, queries, workspace);
//   fovea::attention(fovea::attend(problem, codes));
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "fovea/fovea.hpp"

namespace fovea {

// Operands in eight bits: dense tensors, whose data are 16-byte aligned. Those without data are
// left out; codes and their scales come together.
struct Quantized {
  Tensor q, q_scale;        // as Problem has them; D is padded to a multiple of 32
  Tensor k;                 // likewise
  Tensor v, key_scale;      // ValueLayout::transposed
  Tensor k_scale, v_scale;  // ValueLayout::rows; v then is as Problem has it
  // Of a plan for pages, with k and v: where keys go. Key j of sequence b goes to key
  // first_keys[b] + j of its row of page numbers; lists lie where the problem's do.
  std::span<const std::int32_t> block_table;  // B rows of block_table_columns
  std::int64_t block_table_columns = 0;
  std::span<const std::int32_t> first_keys;  // B entries, multiples of 32; empty: all 0
};

// A pool of pages that hold keys and values in eight bits.
struct PagePool {
  std::int64_t pages = 0;
  std::int64_t page_size = 0;  // keys of a page, a multiple of 32
};

// transposed: as the kernels read it, so that nothing stands in front of them. rows: codes of the
// shape that v has, for other readers, with Dv a multiple of 8; fovea transposes them in front of
// every run.
enum class ValueLayout : std::uint8_t { transposed, rows };

// Quantisation of the operands of problems of one kind. Immutable, safe to run from several threads
// with separate workspaces.
class QuantizePlan {
 public:
  // Shapes, dtypes and strides, without data.
  [[nodiscard]] Quantized operands() const;

  // Bytes that run() needs, of device memory where the problem is there.
  [[nodiscard]] std::size_t workspace_bytes() const;

  // Quantises q, or k and v, or all: those of `to` that have data, which share no memory with
  // anything else. The problem must have the planned shapes, dtypes, strides and alignments; its
  // rows that no sequence uses count as zeros. Host memory: allocates nothing. Device memory: puts
  // kernels into the stream; neither allocates nor waits. Throws Error before anything is written,
  // DeviceError when the device fails, which leaves the operands undefined.
  void run(const Problem& problem, const Quantized& to, std::span<std::byte> workspace) const;

  struct Choice;
  explicit QuantizePlan(std::shared_ptr<const Choice> choice);

 private:
  std::shared_ptr<const Choice> choice_;
};

// q, k and v must be f32, bf16 or f16 with head dimensions up to 256, and not in pages. Host memory
// is quantised on the CPU, device memory on a GPU. Of the options, device and threads count. Throws
// Error or Unsupported, DeviceError when the device fails.
[[nodiscard]] QuantizePlan plan_quantize(const Problem& problem, const Quantization& quantization,
                                         ValueLayout values = ValueLayout::transposed,
                                         const Options& options = {});

// A cache in pages, which Hopper's kernel reads where they are unless gathering them first is the
// faster: Plan::explain() says which. The operands of the plan are the pool, k (pages, page_size,
// Hkv, D), v (pages, Hkv, Dv, page_size) and key_scale; those of a problem whose k and v are
// `pages` dense sequences of page_size keys would be the same. run() writes blocks of 32 keys,
// those of the problem's keys and no other: the last block of a sequence may be short, and is
// written whole, with zeros behind. To append, a caller keeps the keys of a last short block in 16
// bits and has the block written again, from its beginning, whenever keys join it. Two sequences
// may share pages to read, but in one run no two may write to one block.
//
//   codes.block_table = table; codes.first_keys = blocks;     // where the keys of this step go
//   quantizer.run(step, codes, workspace);
//   problem.block_table = table; problem.seqused_k = lengths; // of all keys so far
//   fovea::attention(fovea::attend(problem, codes));
//
// A rotary embedding turns key j of sequence b as key first_keys[b] + j.
[[nodiscard]] QuantizePlan plan_quantize(const Problem& problem, const Quantization& quantization,
                                         const PagePool& pool, const Options& options = {});

// The problem with these operands, all of which have data, in place of its q, k and v.
// softmax_scale is set where it was not, to that of the head dimension before it was padded. Finds
// no fault: plan() does.
[[nodiscard]] Problem attend(Problem problem, const Quantized& operands);

// The arithmetic of an 8-bit kernel, to be studied on any machine.
struct Fp8Arithmetic {
  Quantization quantization;
  Softmax softmax = Softmax::automatic;
  std::int32_t tile_k = 192;  // keys of a step, a multiple of 32
  // Keys whose products one tensor-core accumulator sums before it is added up in fp32; 0: all.
  std::int64_t promote_keys = 0;
  // Bits that the accumulator keeps behind the leading one: 13 on Hopper, 23 is fp32.
  std::int32_t accumulator_bits = 13;
  bool round_weights = true;         // to e4m3
  bool sum_rounded_weights = false;  // the row sum is of rounded weights
  bool unfused =
      false;  // weights are normalised before they are rounded, as without a fused kernel
};

// What such a kernel makes of the problem, computed element by element on the CPU; slow on purpose.
// Results and threads as those of reference(). Takes every dtype, masks by position, softcap, sink,
// lengths and pages; throws Error for bias, mask tensors, ALiBi and dropout, and for arithmetic
// that is none.
[[nodiscard]] Reference reference_fp8(const Problem& problem, const Fp8Arithmetic& arithmetic = {},
                                      int threads = 0);

}  // namespace fovea

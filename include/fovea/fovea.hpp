// fovea: exact attention.
//
//   out = softmax(softcap(softmax_scale * q k^T) + bias - alibi, where visible) v
//
// Describe the call in a Problem, plan() it once, run() it many times:
//
//   fovea::Problem p;
//   p.q = fovea::bshd(q, fovea::DType::f32, batch, seqlen_q, heads_q, head_dim);
//   p.k = ...; p.v = ...; p.out = ...;
//   p.causal = true;
//   const fovea::Plan plan = fovea::plan(p);
//   std::vector<std::byte> workspace(plan.workspace_bytes());
//   plan.run(p, workspace);
//
// Every fault of the input is an Error whose message is one sentence that names the argument, its
// value and what would be right; nothing is written before it is thrown. The library never prints,
// never exits and reads the environment only where docs/environment.md says so.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace fovea {

// A boolean is a byte, of which every value but 0 is true.
enum class DType : std::uint8_t { f32, bf16, f16, e4m3, e5m2, boolean, s8 };

// "f32", "bf16", "f16", "e4m3", "e5m2", "boolean", "s8"
[[nodiscard]] std::string_view name(DType dtype);
// Of one element.
[[nodiscard]] std::size_t size_bytes(DType dtype);

// A strided view of memory the caller owns. Dimension order is fixed per argument (see Problem);
// any layout is expressed by its strides, counted in elements. Strides may be zero (broadcast; in
// inputs only) or negative, that of the last dimension too, and the base needs no alignment beyond
// the element's own. Default-constructed: absent.
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::array<std::int64_t, 4> shape{};
  std::array<std::int64_t, 4> stride{};
  bool present = false;  // an empty tensor (a zero in shape) may have null data and be present
};

// A tensor of the given shape with row-major strides. Neither this nor the next three find a fault:
// plan() does. data is written only where a call takes the tensor for a result.
[[nodiscard]] Tensor contiguous(const void* data, DType dtype, std::array<std::int64_t, 4> shape);
// (batch, seqlen, heads, head_dim) in memory order: the convention of flash-attention.
[[nodiscard]] Tensor bshd(const void* data, DType dtype, std::int64_t batch, std::int64_t seqlen,
                          std::int64_t heads, std::int64_t head_dim);
// The same logical tensor stored as (batch, heads, seqlen, head_dim): PyTorch's convention.
[[nodiscard]] Tensor bhsd(const void* data, DType dtype, std::int64_t batch, std::int64_t seqlen,
                          std::int64_t heads, std::int64_t head_dim);
// Sequences packed row after row, of shape (1, total, heads, head_dim): for cu_seqlens.
[[nodiscard]] Tensor packed(const void* data, DType dtype, std::int64_t total, std::int64_t heads,
                            std::int64_t head_dim);

// Where the tensors, lengths and tables of a problem are.
enum class Memory : std::uint8_t {
  host,   // anywhere the CPU reads; a GPU gets copies and gives its results back before run()
          // returns
  device  // memory of the device that computes: run() only puts work into the problem's stream
};

struct Dropout {
  float probability = 0.0f;  // of dropping a weight, in [0, 1)
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;  // advance between calls; seed, offset and position make the mask
};

// One attention call. Shapes, with B sequences, Hq query and Hkv key/value heads (Hq % Hkv == 0);
// q and k are dense, varlen or paged independently of each other, v always as k:
//
//              dense                  varlen (cu_seqlens given)   paged (block_table given)
//   q          (B, Sq, Hq, D)         (1, total_q, Hq, D)         dense or varlen
//   k          (B, Sk, Hkv, D)        (1, total_k, Hkv, D)        (pages, page_size, Hkv, D)
//   v          (B, Sk, Hkv, Dv)       (1, total_k, Hkv, Dv)       (pages, page_size, Hkv, Dv)
//   out        (B, Sq, Hq, Dv)        (1, total_q, Hq, Dv)        as q
//   lse        (B, Hq, Sq, 1) fp32    (1, Hq, total_q, 1) fp32    as q       optional
//   bias       (B, Hq, Sq, Sk)        (B, Hq, max_seqlen_q, max_seqlen_k)   optional; 1 broadcasts
//   mask       like bias, boolean, true = visible                           optional
//   sink       (1, 1, 1, Hq) fp32: one extra logit per head                 optional
//   alibi      (B or 1, Hq, 1, 1) fp32 slopes                               optional
//   q_scale    (B or 1, Hq, Hkv or 1, 1, 1) fp32: element = code * scale     fp8 alone, optional
//   k_scale, v_scale   (B or 1, Hkv or 1, 1, 1) fp32                         fp8 alone, optional
//
// q, k, v share one dtype; out has it too or fp32 (with fp8 inputs: bf16, f16 or fp32); bias is
// fp32 or has the dtype of q. Scales are positive and finite; in host memory that is checked. Finer
// ones, for each 32 rows of a sequence: (B, Hq, blocks, 1) or (B, Hkv, blocks, 1) with
// ceil(S / 32) blocks where that side is dense, (1, H, total / 32 + B + 1, 1) where it is varlen,
// of which sequence b has those from cu_seqlens[b] / 32 + b on; none for paged keys. D is 1..576,
// Dv is 1..512 and may differ from D. No extent exceeds 2^31 - 1. out and lse share no memory with
// each other or an input, and no two of their elements do. A row that sees no key gives out = 0 and
// lse = -infinity (lse = sink where there is a sink). Rows of out outside every sequence (slack,
// unused) are written as zero with lse = -infinity. Masked and out-of-range elements of k and v are
// never used in arithmetic, whatever they hold.
//
// In device memory, data pointers and those of lengths and tables are device addresses. Lengths and
// page numbers are then not read on the host, so their number is checked and their values are the
// caller's word: cu_seqlens from 0, not decreasing, up to the rows of q and k; no sequence longer
// than max_seqlen; seqused within its sequence; pages in use within k.
struct Problem {
  Tensor q, k, v, out;
  Tensor lse;  // natural logarithm; scale, softcap and sink included
  Tensor bias, mask, sink, alibi;
  Tensor q_scale, k_scale, v_scale;
  // Of k and v as a QuantizePlan writes them (fovea/fp8.hpp): scales of both, in the form that the
  // kernels read; v is then (B, Hkv, Dv, keys), transposed, or (pages, Hkv, Dv, page_size).
  Tensor key_scale;

  std::span<const std::int32_t> cu_seqlens_q;  // B + 1 entries, from 0, not decreasing
  std::span<const std::int32_t> cu_seqlens_k;
  std::span<const std::int32_t> seqused_q;  // B entries: only the first n rows of a sequence count
  std::span<const std::int32_t> seqused_k;
  // Varlen and paged: bounds on the lengths, which plans for changing lengths need. 0: the longest
  // sequence of cu_seqlens (in device memory: all rows, a bound that costs time), or what a row of
  // the block table can hold.
  std::int64_t max_seqlen_q = 0;
  std::int64_t max_seqlen_k = 0;

  // B rows of block_table_columns page numbers; needs seqused_k. Entries beyond the pages that
  // seqused_k uses are never looked at.
  std::span<const std::int32_t> block_table;
  std::int64_t block_table_columns = 0;

  std::optional<float> softmax_scale;  // default 1 / sqrt(D)
  bool causal = false;                 // bottom-right aligned
  std::int64_t window_left = -1;       // inclusive; -1 is unbounded
  std::int64_t window_right = -1;
  float softcap = 0.0f;  // score = softcap * tanh(score / softcap); 0 is off
  Dropout dropout;
  std::int32_t num_splits = 0;  // parts to split the keys into; 0 lets the plan decide
  bool deterministic = false;

  Memory memory = Memory::host;
  void* stream = nullptr;  // cudaStream_t to work in, with device memory; null: the default stream
};

// automatic: the CPU for host memory, the GPU for device memory. cuda is the device of the calling
// thread's current context, or else the first one. The emulated ones run the GPU kernels on the
// CPU, checked and slowly.
enum class Device : std::uint8_t {
  automatic,
  cpu,
  cuda,
  emulated_sm90a,
  emulated_sm100a,
  emulated_sm103a
};

// "auto", "cpu", "cuda", "emulated:sm_90a", "emulated:sm_100a", "emulated:sm_103a"
[[nodiscard]] std::string_view name(Device device);

// How the running reference of a softmax row is kept (docs/kernels/softmax.md). Results agree up to
// rounding; automatic takes what measures fastest.
enum class Softmax : std::uint8_t { automatic, online, conditional, sum_guard };

// "auto", "online", "conditional", "sum_guard"
[[nodiscard]] std::string_view name(Softmax softmax);

// What shares a scale: a whole tensor, the rows of one (sequence, head), or 32 rows of it.
enum class Fp8Scales : std::uint8_t { tensor, head, block };

// Rotary embedding: a pair of columns (x, y) becomes (x cos - y sin, x sin + y cos) of its row's
// position. Key j of a sequence stands at first_position + j, and its last query where its last key
// does, as masks have it. The tables are read in every run, on a GPU from its memory.
struct Rotary {
  Tensor cos, sin;  // (1, 1, positions, pairs), f32, bf16 or f16; absent: nothing is turned
  bool interleaved = false;  // pairs (0, 1), (2, 3), ...; otherwise (0, pairs), (1, pairs + 1), ...
  std::int64_t first_position = 0;
};

// How q, k and v become eight bits. Scales of floating formats are powers of two.
struct Quantization {
  // Or e5m2, which keeps a bit less of every element; or s8: q and k become signed integers, v
  // e4m3, which is the more accurate where q and k are rotated (docs/kernels/fp8.md, on GPUs:
  // sm_90a alone). A block of integers with an element that is not finite is NaN.
  DType dtype = DType::e4m3;
  Fp8Scales scales = Fp8Scales::block;
  // q and k times random signs times a Hadamard matrix, which cancels in q k^T: FlashAttention-3's
  // incoherent processing. Head dimensions are padded to a multiple of 32 and rotated in blocks of
  // the largest power of two that divides that.
  bool rotate = true;
  std::uint64_t seed = 0;  // of the signs
  Rotary rotary = {};      // of q and k, in front of that; of nothing that is in 8 bits already
};

// Attention in eight bits (docs/kernels/fp8.md). Of 8-bit inputs, which are computed so unasked,
// promote_keys alone counts.
struct EightBits {
  Quantization quantization;
  // GPUs: keys whose products one tensor-core accumulator, of 14 bits, sums before it is added up
  // in fp32. 0: all, which is faster, and wrong where many keys share the weight. The CPU sums in
  // fp32.
  std::int64_t promote_keys = 768;
};

struct Options {
  Device device = Device::automatic;
  int threads = 0;  // CPU: at most 1024; 0 takes the OpenMP default
  Softmax softmax = Softmax::automatic;
  // Device memory: the plan keeps its workspace, workspace_bytes() is 0, and runs of the plan must
  // follow one another in stream order.
  bool own_workspace = false;
  // Fields of a GPU kernel's configuration to set by hand, as explain() prints them: for
  // measurements. "tile_k=96,stages=3"
  std::string configuration = {};
  // q, k and v of f32, bf16 or f16 are quantised in front of every run; head dimensions up to 256.
  std::optional<EightBits> eight_bits = {};
};

// Counts of one run; what the softmax policy and the tile skipping did. GPUs count repairs and
// recomputed_tiles.
struct Statistics {
  std::int64_t tiles_full = 0;        // (row block, key block) pairs that no mask touched
  std::int64_t tiles_partial = 0;     // ... that were masked element by element
  std::int64_t rescales = 0;          // rows whose sums were rescaled to a new reference
  std::int64_t repairs = 0;           // sum guard: rows repaired by a power of two
  std::int64_t recomputed_tiles = 0;  // sum guard: rows of a tile taken again with a true maximum
  std::int64_t splits = 1;
};

// The input is wrong: the caller can mend it.
class Error : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// The input is right, but no backend that was asked for does it; the message says what would.
class Unsupported : public Error {
 public:
  using Error::Error;
};

// The device failed: a driver call or a launch.
class DeviceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A validated problem with its chosen configuration. Immutable, safe to run from several threads
// with separate workspaces.
class Plan {
 public:
  // Bytes run() needs; their address needs no particular alignment, their contents are nobody's.
  // With device memory they are device memory.
  [[nodiscard]] std::size_t workspace_bytes() const;

  // Computes the problem, which must have the planned shapes, dtypes and options; pointers,
  // strides, the stream, the dropout seed and offset, and lengths (within the planned bounds) may
  // differ. The workspace shares no memory with any tensor. Throws Error before anything is
  // written, DeviceError when the device fails, which leaves the results undefined.
  //
  // Host memory on the CPU: allocates nothing. Device memory: puts kernels into the stream and
  // returns; neither allocates nor waits, so that a CUDA graph can capture it; only statistics, if
  // asked for, wait for the stream. The workspace is in use until the stream has passed. Host
  // memory on a GPU: allocates there, copies and waits.
  void run(const Problem& problem, std::span<std::byte> workspace,
           Statistics* statistics = nullptr) const;

  // The choice, its reasons, and the reasons against the other candidates; a few lines of text.
  [[nodiscard]] std::string explain() const;

  // Device the plan runs on: never automatic.
  [[nodiscard]] Device device() const;

  struct Choice;
  explicit Plan(std::shared_ptr<const Choice> choice);

 private:
  std::shared_ptr<const Choice> choice_;
};

// Validates the problem and chooses how to compute it; for a GPU, compiles its kernels, which takes
// seconds, or finds them in the cache (docs/environment.md). The data pointers are not read except
// the lengths and tables, whose values are checked. Throws Error or Unsupported, DeviceError when
// the device fails.
[[nodiscard]] Plan plan(const Problem& problem, const Options& options = {});

// plan() and run() in one call, with a workspace of its own. Waits for the result. Throws what they
// throw.
void attention(const Problem& problem, const Options& options = {},
               Statistics* statistics = nullptr);

// The gradients of one attention call: those of its inputs from that of its output. The problem is
// the one of the forward pass, with out and lse as it left them, dropout seed and offset included;
// both are inputs here, and lse is required.
//
//   dout    shape and dtype of out; a gradient that is the same everywhere may have strides of 0
//   dlse    shape of lse, fp32: the gradient of the returned lse                       optional
//   dq      shape of q; dtype of q or fp32
//   dk, dv  shapes of k and v; dtype of q or fp32
//   dsink   (1, 1, 1, Hq) fp32                          optional; needs a sink
//   dbias   shape of bias, summed over the extents of 1 that broadcast; dtype of bias or fp32
//                                                       optional; needs a bias
//
// Every element of every gradient is written: rows outside the sequences, and keys and queries that
// meet nobody, get zero. A gradient shares no memory with another tensor, nor do two of its
// elements.
struct Gradients {
  Tensor dout, dlse;
  Tensor dq, dk, dv;
  Tensor dsink, dbias;
};

// A validated problem with its gradients and the chosen configuration; as Plan.
class BackwardPlan {
 public:
  [[nodiscard]] std::size_t workspace_bytes() const;

  // As Plan::run(). Gradients are repeatable to the bit on one machine: on the CPU always, on a GPU
  // with Problem::deterministic.
  void run(const Problem& problem, const Gradients& gradients,
           std::span<std::byte> workspace) const;

  [[nodiscard]] std::string explain() const;
  [[nodiscard]] Device device() const;

  struct Choice;
  explicit BackwardPlan(std::shared_ptr<const Choice> choice);

 private:
  std::shared_ptr<const Choice> choice_;
};

// As plan(). Options::softmax has no meaning here: the weights follow from lse. Throws Unsupported
// for paged keys, whose pages may serve several sequences: gather them into dense or packed ones.
[[nodiscard]] BackwardPlan plan_backward(const Problem& problem, const Gradients& gradients,
                                         const Options& options = {});

// plan_backward() and run() in one call, with a workspace of its own. Waits for the result.
void attention_backward(const Problem& problem, const Gradients& gradients,
                        const Options& options = {});

// Attention of one part of the keys, in host memory: out (B, S, H, Dv) and lse (B, H, S, 1), as in
// Problem.
struct Part {
  Tensor out;
  Tensor lse;
};

// Combines attention over disjoint sets of keys into attention over their union (split-KV, ring and
// cascade attention). A part with lse = -infinity is neutral, whatever its out holds; no parts at
// all give out = 0. The sink, (1, 1, 1, H) fp32, which no part may include, is added exactly once.
//
// Every out is fp32, bf16 or fp16, each as it likes; every lse is fp32, and the result's may be
// absent. The result may be one of the parts (the same memory with the same strides), so that a
// ring accumulates in place, but may share memory with no part otherwise. Works with OpenMP's
// threads. Throws Error before anything is written.
void merge(std::span<const Part> parts, const Part& result, const Tensor& sink = {});

// Attention by its definition, one row at a time, for checking results of a problem in host memory.
// Slow on purpose.
enum class Precision : std::uint8_t {
  fp64,  // the truth
  same   // what an unfused computation in the problem's own dtypes gives: sets the tolerance
};

// Dense row order, whatever the strides of the problem's out and lse, which are not written:
// out (B, Sq, Hq, Dv) and lse (B, Hq, Sq); varlen (1, total_q, Hq, Dv) and (1, Hq, total_q).
// threads as in Options. Throws Error.
struct Reference {
  std::vector<double> out;
  std::vector<double> lse;
};
[[nodiscard]] Reference reference(const Problem& problem, Precision precision = Precision::fp64,
                                  int threads = 0);

// The same for the gradients, which are not written, nor are out and lse read. Absent ones are
// empty; dbias is the sum that its shape asks for. Paged keys are an Error, too.
struct ReferenceGradients {
  std::vector<double> dq, dk, dv, dsink, dbias;
};
[[nodiscard]] ReferenceGradients reference_backward(const Problem& problem,
                                                    const Gradients& gradients,
                                                    Precision precision = Precision::fp64,
                                                    int threads = 0);

// The instruction set that Device::cpu computes with on this machine, e.g. "AVX-512 with BF16".
[[nodiscard]] std::string_view cpu_instruction_set();

// "0.1.0"
[[nodiscard]] std::string_view version();

}  // namespace fovea

/* fovea: exact attention, C interface. The semantics are those of fovea.hpp.
 *
 * Functions that can fail return a status; on failure fovea_last_error() holds one sentence that
 * names the argument, its value and what would be right, valid until the calling thread's next call
 * into the library.
 *
 * fovea_problem, fovea_gradients, fovea_options, fovea_statistics and fovea_quantized may grow:
 * they begin with the size that they have in the caller's header, set by their _init function, that
 * of fovea_quantized by fovea_quantize_plan_operands. What a shorter one lacks has its default; a
 * longer one is accepted as long as the part this library does not know is zero.
 *
 *   fovea_problem p;
 *   fovea_problem_init(&p, sizeof p);
 *   p.q = fovea_tensor_bshd(q, FOVEA_F32, batch, seqlen_q, heads_q, head_dim);
 *   ...
 *   if (fovea_attention(&p, NULL, NULL) != FOVEA_OK) puts(fovea_last_error());
 */
#ifndef FOVEA_FOVEA_H
#define FOVEA_FOVEA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fovea_status {
  FOVEA_OK = 0,
  FOVEA_INVALID_ARGUMENT = 1, /* the input is wrong */
  FOVEA_UNSUPPORTED = 2,      /* the input is right, but no backend asked for does it */
  FOVEA_OUT_OF_MEMORY = 3,
  FOVEA_DEVICE_ERROR = 4, /* a driver or launch failure */
  FOVEA_INTERNAL_ERROR = 5
} fovea_status;

/* A boolean is a byte, of which every value but 0 is true. */
typedef enum fovea_dtype {
  FOVEA_F32 = 0,
  FOVEA_BF16 = 1,
  FOVEA_F16 = 2,
  FOVEA_E4M3 = 3,
  FOVEA_E5M2 = 4,
  FOVEA_BOOLEAN = 5,
  FOVEA_S8 = 6
} fovea_dtype;

/* Which are which: fovea::Device. */
typedef enum fovea_device {
  FOVEA_DEVICE_AUTOMATIC = 0,
  FOVEA_DEVICE_CPU = 1,
  FOVEA_DEVICE_CUDA = 2,
  FOVEA_DEVICE_EMULATED_SM90A = 3,
  FOVEA_DEVICE_EMULATED_SM100A = 4,
  FOVEA_DEVICE_EMULATED_SM103A = 5
} fovea_device;

typedef enum fovea_memory {
  FOVEA_MEMORY_HOST = 0,  /* anywhere the CPU reads */
  FOVEA_MEMORY_DEVICE = 1 /* pointers, those of lengths and tables too, are device addresses */
} fovea_memory;

/* How the running reference of a softmax row is kept: fovea::Softmax. */
typedef enum fovea_softmax {
  FOVEA_SOFTMAX_AUTOMATIC = 0,
  FOVEA_SOFTMAX_ONLINE = 1,
  FOVEA_SOFTMAX_CONDITIONAL = 2,
  FOVEA_SOFTMAX_SUM_GUARD = 3
} fovea_softmax;

/* A strided view; strides count elements. present = 0: the tensor is absent. */
typedef struct fovea_tensor {
  void* data;
  fovea_dtype dtype;
  int32_t present;
  int64_t shape[4];
  int64_t stride[4];
} fovea_tensor;

/* These four report no fault: whoever takes the tensor does. data is written only where a call
 * takes the tensor for a result. */

/* (batch, seqlen, heads, head_dim) in memory order. */
fovea_tensor fovea_tensor_bshd(const void* data, fovea_dtype dtype, int64_t batch, int64_t seqlen,
                               int64_t heads, int64_t head_dim);
/* The same logical tensor stored as (batch, heads, seqlen, head_dim). */
fovea_tensor fovea_tensor_bhsd(const void* data, fovea_dtype dtype, int64_t batch, int64_t seqlen,
                               int64_t heads, int64_t head_dim);
/* Sequences packed row after row, of shape (1, total, heads, head_dim): for cu_seqlens. */
fovea_tensor fovea_tensor_packed(const void* data, fovea_dtype dtype, int64_t total, int64_t heads,
                                 int64_t head_dim);
/* Row-major strides for any shape. */
fovea_tensor fovea_tensor_contiguous(const void* data, fovea_dtype dtype, const int64_t shape[4]);

/* An array of count integers; null and 0: absent. */
typedef struct fovea_lengths {
  const int32_t* data;
  int64_t count;
} fovea_lengths;

/* Fields as in fovea::Problem. */
typedef struct fovea_problem {
  size_t size; /* set by fovea_problem_init */

  fovea_tensor q, k, v, out;
  fovea_tensor lse;
  fovea_tensor bias, mask, sink, alibi;

  fovea_lengths cu_seqlens_q, cu_seqlens_k;
  fovea_lengths seqused_q, seqused_k;
  int64_t max_seqlen_q, max_seqlen_k;

  fovea_lengths block_table;
  int64_t block_table_columns;

  float softmax_scale; /* read only if has_softmax_scale; otherwise 1 / sqrt(head_dim) */
  int32_t has_softmax_scale;
  int32_t causal;
  int64_t window_left, window_right; /* -1: unbounded */
  float softcap;
  float dropout_probability;
  uint64_t dropout_seed, dropout_offset;
  int32_t num_splits;
  int32_t deterministic;

  fovea_memory memory;
  void* stream; /* cudaStream_t, with device memory */

  fovea_tensor q_scale, k_scale, v_scale; /* of 8-bit q, k and v */
  fovea_tensor key_scale;                 /* of k and v as fovea_quantize_plan_run writes them */
} fovea_problem;

/* What shares a scale: a whole tensor, the rows of one (sequence, head), or 32 rows of it. */
typedef enum fovea_fp8_scales {
  FOVEA_FP8_SCALES_TENSOR = 0,
  FOVEA_FP8_SCALES_HEAD = 1,
  FOVEA_FP8_SCALES_BLOCK = 2
} fovea_fp8_scales;

/* Fields as in fovea::Rotary. */
typedef struct fovea_rotary {
  fovea_tensor cos, sin;
  int32_t interleaved;
  int64_t first_position;
} fovea_rotary;

/* Fields as in fovea::Quantization. */
typedef struct fovea_quantization {
  fovea_dtype dtype; /* FOVEA_E4M3, FOVEA_E5M2, or FOVEA_S8, where v is e4m3 */
  fovea_fp8_scales scales;
  int32_t rotate;
  uint64_t seed;
  const fovea_rotary* rotary; /* null: nothing is turned */
} fovea_quantization;

typedef struct fovea_options {
  size_t size; /* set by fovea_options_init */
  fovea_device device;
  int32_t threads; /* CPU: at most 1024; 0 takes the OpenMP default */
  fovea_softmax softmax;
  int32_t own_workspace;           /* device memory: the plan keeps its workspace */
  const char* configuration;       /* of a GPU kernel, "name=value,..."; null: the plan's choice */
  int32_t eight_bits;              /* quantise q, k and v in front of every run */
  fovea_quantization quantization; /* this and the next are read only if eight_bits */
  int64_t promote_keys;            /* as in fovea::EightBits; -1: its default */
} fovea_options;

/* Fields as in fovea::Statistics: counts of one run. */
typedef struct fovea_statistics {
  size_t size; /* set by fovea_statistics_init */
  int64_t tiles_full, tiles_partial, rescales, repairs, recomputed_tiles, splits;
} fovea_statistics;

/* Set every field to its default, and size to the given one: pass sizeof *problem and so on. */
fovea_status fovea_problem_init(fovea_problem* problem, size_t size);
fovea_status fovea_options_init(fovea_options* options, size_t size);
fovea_status fovea_statistics_init(fovea_statistics* statistics, size_t size);

typedef struct fovea_plan fovea_plan;

/* As fovea::plan(). options may be null. *plan is owned by the caller (fovea_plan_destroy), or null
 * on failure. */
fovea_status fovea_plan_create(const fovea_problem* problem, const fovea_options* options,
                               fovea_plan** plan);
void fovea_plan_destroy(fovea_plan* plan); /* null is ignored */
/* Bytes that a run needs at least, of any alignment. */
fovea_status fovea_plan_workspace_bytes(const fovea_plan* plan, size_t* bytes);

/* As fovea::Plan::run(). statistics may be null. workspace may be null when workspace_bytes is 0.
 * A plan may run in several threads at once, each with its own workspace.
 * With device memory, workspace is device memory and the call returns before the work is done, but
 * for statistics it waits. */
fovea_status fovea_plan_run(const fovea_plan* plan, const fovea_problem* problem, void* workspace,
                            size_t workspace_bytes, fovea_statistics* statistics);

/* Writes the explanation, cut to capacity and terminated; *length is its whole length without the
 * terminator. buffer may be null when capacity is 0, length always. */
fovea_status fovea_plan_explain(const fovea_plan* plan, char* buffer, size_t capacity,
                                size_t* length);

/* Plan and run in one call. options and statistics may be null. */
fovea_status fovea_attention(const fovea_problem* problem, const fovea_options* options,
                             fovea_statistics* statistics);

/* Quantise once, attend many times; fovea::QuantizePlan in fovea/fp8.hpp says how.
 *
 * How codes of v lie: (B, Hkv, Dv, keys), as kernels read them, or in the shape of v. */
typedef enum fovea_value_layout {
  FOVEA_VALUES_TRANSPOSED = 0,
  FOVEA_VALUES_ROWS = 1
} fovea_value_layout;

/* Fields as in fovea::Quantized. */
typedef struct fovea_quantized {
  size_t size; /* set by fovea_quantize_plan_operands */
  fovea_tensor q, q_scale;
  fovea_tensor k, v;
  fovea_tensor key_scale;
  fovea_tensor k_scale, v_scale;
  fovea_lengths block_table; /* of a plan for pages, as the next two: where keys go */
  int64_t block_table_columns;
  fovea_lengths first_keys; /* multiples of 32; none: all 0 */
} fovea_quantized;

typedef struct fovea_quantize_plan fovea_quantize_plan;

fovea_quantization fovea_quantization_default(void); /* e4m3, scales of blocks, rotated */

/* As fovea::plan_quantize(). options may be null, quantization not. *plan is owned by the caller
 * (fovea_quantize_plan_destroy), or null on failure. */
fovea_status fovea_quantize_plan_create(const fovea_problem* problem,
                                        const fovea_quantization* quantization,
                                        fovea_value_layout values, const fovea_options* options,
                                        fovea_quantize_plan** plan);
/* The same for keys and values that go to a pool of pages of page_size keys, a multiple of 32:
 * fovea::PagePool. */
fovea_status fovea_quantize_plan_create_pages(const fovea_problem* problem,
                                              const fovea_quantization* quantization, int64_t pages,
                                              int64_t page_size, const fovea_options* options,
                                              fovea_quantize_plan** plan);
void fovea_quantize_plan_destroy(fovea_quantize_plan* plan); /* null is ignored */
/* Bytes that a run needs at least, of any alignment. */
fovea_status fovea_quantize_plan_workspace_bytes(const fovea_quantize_plan* plan, size_t* bytes);

/* Fills *operands: shapes, dtypes and strides, without data. Pass sizeof *operands. */
fovea_status fovea_quantize_plan_operands(const fovea_quantize_plan* plan,
                                          fovea_quantized* operands, size_t size);
/* Quantises q, or k and v, or all: those of *to that have data, 16-byte aligned, as
 * fovea::QuantizePlan::run(). workspace may be null when workspace_bytes is 0. */
fovea_status fovea_quantize_plan_run(const fovea_quantize_plan* plan, const fovea_problem* problem,
                                     const fovea_quantized* to, void* workspace,
                                     size_t workspace_bytes);

/* Puts operands, all of which have data, in place of the problem's q, k and v. Sets softmax_scale
 * where it has none, to that of the head dimension before it was padded. */
fovea_status fovea_problem_attend(fovea_problem* problem, const fovea_quantized* operands);

/* The gradients of a problem; fields as in fovea::Gradients. */
typedef struct fovea_gradients {
  size_t size; /* set by fovea_gradients_init */

  fovea_tensor dout, dlse;
  fovea_tensor dq, dk, dv;
  fovea_tensor dsink, dbias;
} fovea_gradients;

fovea_status fovea_gradients_init(fovea_gradients* gradients, size_t size);

typedef struct fovea_backward_plan fovea_backward_plan;

/* As fovea::plan_backward() and fovea::BackwardPlan; pointers as in the functions of fovea_plan. */
fovea_status fovea_backward_plan_create(const fovea_problem* problem,
                                        const fovea_gradients* gradients,
                                        const fovea_options* options, fovea_backward_plan** plan);
void fovea_backward_plan_destroy(fovea_backward_plan* plan);
fovea_status fovea_backward_plan_workspace_bytes(const fovea_backward_plan* plan, size_t* bytes);
fovea_status fovea_backward_plan_run(const fovea_backward_plan* plan, const fovea_problem* problem,
                                     const fovea_gradients* gradients, void* workspace,
                                     size_t workspace_bytes);
fovea_status fovea_backward_plan_explain(const fovea_backward_plan* plan, char* buffer,
                                         size_t capacity, size_t* length);

/* Plan and run in one call. options may be null. */
fovea_status fovea_attention_backward(const fovea_problem* problem,
                                      const fovea_gradients* gradients,
                                      const fovea_options* options);

/* Of one part of the keys, in host memory: out (B, S, H, Dv) and lse (B, H, S, 1), fp32. */
typedef struct fovea_part {
  fovea_tensor out;
  fovea_tensor lse;
} fovea_part;

/* As fovea::merge(): combines count parts into result, whose lse may be absent. sink, (1, 1, 1, H)
 * fp32, may be null, and parts when count is 0. */
fovea_status fovea_merge(const fovea_part* parts, int64_t count, const fovea_part* result,
                         const fovea_tensor* sink);

const char* fovea_last_error(void); /* of this thread; empty if its last call succeeded */
const char* fovea_version(void);    /* "0.1.0" */

#ifdef __cplusplus
}
#endif

#endif

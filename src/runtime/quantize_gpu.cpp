#include "runtime/quantize_gpu.h"

#include <algorithm>
#include <span>

#include "runtime/source.h"
#include "runtime/text.h"

namespace fovea::runtime {

namespace {

using core::DType;
using core::int32;
using core::int64;
using core::QuantizeConfig;
using core::QuantizeParams;
using core::QuantizePass;

std::string_view text_of(DType type) {
  switch (type) {
    case DType::bf16: return "bf16";
    case DType::f16: return "f16";
    case DType::e4m3: return "e4m3";
    case DType::e5m2: return "e5m2";
    case DType::s8: return "s8";
    default: return "f32";
  }
}

std::string_view text_of(QuantizePass pass) {
  switch (pass) {
    case QuantizePass::measure: return "measure";
    case QuantizePass::apply: return "apply";
    case QuantizePass::scales: return "scales";
    default: return "block";
  }
}

std::string_view text_of(core::RotaryPairs pairing) {
  switch (pairing) {
    case core::RotaryPairs::halves: return "halves";
    case core::RotaryPairs::neighbours: return "neighbours";
    default: return "none";
  }
}

// Eight elements of a row are one access of the kernel (two of fp32).
bool suits_vectors(const core::View& view, int32 columns) {
  const int64 size = core::size_bytes(view.dtype);
  const int64 unit = std::min<int64>(8 * size, 16) / size;
  if (columns % 8 != 0 || view.stride[3] != 1) return false;
  if (reinterpret_cast<DeviceAddress>(view.data) % static_cast<DeviceAddress>(unit * size) != 0) {
    return false;
  }
  return std::all_of(view.stride, view.stride + 3, [&](int64 s) { return s % unit == 0; });
}

// Whether a kernel has to look for sequences: queries of a rotary embedding stand by their keys.
bool is_ragged(const core::Problem& p, const core::View& view, const core::Rotary& rotary) {
  const bool queries = p.cu_seqlens_q != nullptr || p.seqused_q != nullptr;
  const bool keys = p.cu_seqlens_k != nullptr || p.seqused_k != nullptr;
  return &view == &p.q ? queries || (rotary && keys) : keys;
}

// Four angles are one access of the kernel, which has both columns of a pair in one thread.
bool suits_vectors(const core::Rotary& rotary) {
  const bool halves = rotary.pairing == core::RotaryPairs::halves;
  const auto fits = [](const core::View& table) {
    const DeviceAddress bytes = 4 * static_cast<DeviceAddress>(core::size_bytes(table.dtype));
    return table.stride[3] == 1 && table.stride[2] % 4 == 0 &&
           reinterpret_cast<DeviceAddress>(table.data) % bytes == 0;
  };
  return !rotary || (rotary.pairs % (halves ? 32 : 4) == 0 && fits(rotary.cos) && fits(rotary.sin));
}

core::RotaryParams rotary_params(const core::Problem& p, const core::View& view,
                                 const core::Rotary& rotary) {
  core::RotaryParams params;
  if (!rotary || &view == &p.v) return params;
  params.cos = rotary.cos.data;
  params.sin = rotary.sin.data;
  for (int i = 0; i < 2; ++i) {
    params.cos_stride[i] = rotary.cos.stride[2 + i];
    params.sin_stride[i] = rotary.sin.stride[2 + i];
  }
  params.positions = static_cast<int32>(rotary.positions);
  params.first = static_cast<int32>(rotary.first);
  if (&view != &p.q) return params;
  params.aligned_to_keys = is_ragged(p, view, rotary);
  if (!params.aligned_to_keys) params.first += static_cast<int32>(p.seqlen_k - p.seqlen_q);
  params.seqlen_k = static_cast<int32>(p.seqlen_k);
  params.cu_seqlens_k = p.cu_seqlens_k;
  params.seqused_k = p.seqused_k;
  return params;
}

// q, k or v of a problem, with what the kernels need to find its rows and scales.
QuantizeParams operand(const core::Problem& p, const core::View& view, const core::Rotary& rotary) {
  const core::Fp8Layout l = core::fp8_layout(p);
  const bool queries = &view == &p.q;
  const core::View& scale = queries ? p.q_scale : &view == &p.k ? p.k_scale : p.v_scale;
  QuantizeParams params;
  params.x = view.data;
  std::copy(view.stride, view.stride + 4, params.stride);
  params.rows = queries ? l.rows_q : l.rows_k;
  params.heads = queries ? l.heads_q : l.heads_kv;
  params.columns = &view == &p.v ? p.head_dim_v : p.head_dim;
  params.code_columns = &view == &p.v ? p.head_dim_v : l.columns;
  params.blocks = static_cast<int32>(queries ? l.blocks_q : l.blocks_k);
  params.sequences = static_cast<int32>(p.batch);
  params.cu_seqlens = queries ? p.cu_seqlens_q : p.cu_seqlens_k;
  params.seqused = queries ? p.seqused_q : p.seqused_k;
  if (!queries && p.is_paged()) {
    params.block_table = p.block_table;
    params.block_table_stride = p.block_table_stride;
    params.page_size = p.page_size;
  }
  params.rotary = rotary_params(p, view, rotary);
  params.scale = static_cast<const float*>(scale.data);
  std::copy(scale.stride, scale.stride + 3, params.scale_stride);
  params.scale_heads = queries ? p.q_scale_heads : 1;
  return params;
}

template <typename Value>
Value* pointer_to(DeviceAddress address) {
  return reinterpret_cast<Value*>(address);
}

}  // namespace

std::string quantize_text(const QuantizeConfig& c) {
  const auto flag = [](bool value) { return value ? "true" : "false"; };
  KernelSource source;
  source.name = "quantize_" + std::string(text_of(c.pass)) + "_" + std::string(text_of(c.dtype)) +
                "_to_" + std::string(text_of(c.to));
  source.include = "device/quantize.cuh";
  source.call =
      "fovea::device::quantize<fovea::core::QuantizeConfig{.dtype = fovea::core::DType::" +
      std::string(text_of(c.dtype)) + ", .to = fovea::core::DType::" + std::string(text_of(c.to)) +
      ", .columns = " + std::to_string(c.columns) + ", .rotate = " + flag(c.rotate) +
      ", .transpose = " + flag(c.transpose) + ", .vectors = " + flag(c.vectors) +
      ", .scaled = " + flag(c.scaled) + ", .ragged = " + flag(c.ragged) +
      ", .paged = " + flag(c.paged) + (c.to_pages ? ", .to_pages = true" : "") +
      ", .rotary = fovea::core::RotaryPairs::" + std::string(text_of(c.rotary)) +
      ", .rotary_pairs = " + std::to_string(c.rotary_pairs) +
      ", .rotary_dtype = fovea::core::DType::" + std::string(text_of(c.rotary_dtype)) +
      ", .pass = fovea::core::QuantizePass::" + std::string(text_of(c.pass)) + "}>";
  source.params = "fovea::core::QuantizeParams";
  source.threads = core::quantize_threads(c);
  source.ctas = core::quantize_ctas(c);
  return kernel_text(source);
}

Quantizer::Quantizer(Device& device, const core::Problem& p, const core::QuantizeOptions& options,
                     const QuantizeParts& parts, bool tolerates_spills)
    : device_(device), options_(options), parts_(parts) {
  check_tables();
  q_ = build(p, p.q, parts.q, false, tolerates_spills);
  k_ = build(p, p.k, parts.k, false, tolerates_spills);
  v_ = build(p, p.v, parts.v, parts.transpose_v, tolerates_spills);
}

void Quantizer::check_tables() const {
  if (!options_.rotary) return;
  for (const void* table : {options_.rotary.cos.data, options_.rotary.sin.data}) {
    const auto address = reinterpret_cast<DeviceAddress>(table);
    require(device_.reaches(address), "rotary.cos or rotary.sin has data at address ", address,
            ", which is not memory of ", device_.properties().name, "; on a GPU both must be");
  }
}

Quantizer::Pass Quantizer::build(const core::Problem& p, const core::View& view, Quantize what,
                                 bool transpose, bool tolerates_spills) const {
  Pass pass;
  pass.what = what;
  if (what == Quantize::none) return pass;
  const bool values = &view == &p.v;
  const bool coded = core::is_eight_bit(view.dtype);
  const int32 columns = values ? p.head_dim_v : p.head_dim;
  QuantizeConfig& c = pass.config;
  c.dtype = view.dtype;
  c.to = core::code_type(view.dtype, options_);
  if (values) c.to = core::value_type(c.to);
  // As rows, v keeps its own columns.
  c.columns = core::fp8_columns(columns);
  c.rotate = options_.rotate && !values && !coded;
  c.transpose = transpose;
  c.vectors = suits_vectors(view, columns);
  if (options_.rotary && !values && !coded) {
    c.rotary = options_.rotary.pairing;
    c.rotary_pairs = options_.rotary.pairs;
    c.rotary_dtype = options_.rotary.cos.dtype;
    c.vectors = c.vectors && suits_vectors(options_.rotary);
  }
  c.scaled = static_cast<bool>(values ? p.v_scale : &view == &p.k ? p.k_scale : p.q_scale);
  c.ragged = is_ragged(p, view, options_.rotary);
  c.paged = &view != &p.q && p.is_paged();
  c.to_pages = &view != &p.q && parts_.to_pages;
  const auto load = [&](QuantizePass which) {
    c.pass = which;
    return load_kernel(device_, default_jit(), quantize_text(c), !tolerates_spills);
  };
  if (what == Quantize::scales) {
    pass.write = load(QuantizePass::scales);
  } else if (coded || options_.granularity == core::ScaleGranularity::block) {
    pass.write = load(QuantizePass::block);
  } else {
    pass.measure = load(QuantizePass::measure);
    pass.write = load(QuantizePass::apply);
  }
  return pass;
}

bool Quantizer::suits(const core::Problem& p) const {
  const auto fits = [&](const Pass& pass, const core::View& view, int32 columns) {
    if (pass.what == Quantize::none) return true;
    if (is_ragged(p, view, options_.rotary) && !pass.config.ragged) return false;
    return pass.what != Quantize::codes || !pass.config.vectors || suits_vectors(view, columns);
  };
  return fits(q_, p.q, p.head_dim) && fits(k_, p.k, p.head_dim) && fits(v_, p.v, p.head_dim_v);
}

std::size_t Quantizer::scratch_bytes(const core::Problem& p) const {
  switch (options_.granularity) {
    case core::ScaleGranularity::block: return 0;
    case core::ScaleGranularity::tensor: return sizeof(core::uint32);
    case core::ScaleGranularity::head: break;
  }
  return static_cast<std::size_t>(p.batch) *
         static_cast<std::size_t>(std::max(p.heads_q, p.heads_kv)) * sizeof(core::uint32);
}

void Quantizer::run(const Pass& pass, QuantizeParams params, int64 batches, DeviceAddress scratch,
                    Stream stream) const {
  if (pass.what == Quantize::none) return;
  const int32 blocks_of_cta = core::quantize_rows(pass.config) / core::scale_block;
  params.tiles = static_cast<int32>(core::ceil_div(params.blocks, blocks_of_cta));
  params.batches = static_cast<int32>(batches);
  const int64 places = int64{params.tiles} * params.heads * batches;
  const int64 at_once = int64{device_.properties().sm_count} * core::quantize_ctas(pass.config);
  LaunchConfig launch;
  launch.grid.x = static_cast<std::uint32_t>(std::min(places, at_once));
  launch.block.x = static_cast<std::uint32_t>(core::quantize_threads(pass.config));
  launch.dynamic_shared_bytes =
      static_cast<std::uint32_t>(core::quantize_shared_bytes(pass.config));
  if (launch.grid.x == 0) return;
  const auto ctas = static_cast<int32>(launch.grid.x);
  params.step[0] = ctas % params.heads;
  params.step[1] = ctas / params.heads % params.tiles;
  params.step[2] = ctas / params.heads / params.tiles;
  params.signs = core::rotation_signs(options_.seed);
  const auto bytes = std::as_bytes(std::span(&params, 1));
  if (pass.measure != nullptr) {
    const bool heads = options_.granularity == core::ScaleGranularity::head;
    params.largest = reinterpret_cast<core::uint32*>(scratch);
    params.largest_stride[0] = heads ? params.heads : 0;
    params.largest_stride[1] = heads ? 1 : 0;
    const std::size_t count =
        heads ? static_cast<std::size_t>(params.sequences) * static_cast<std::size_t>(params.heads)
              : 1;
    device_.fill(scratch, 0, count * sizeof(core::uint32), stream);
    device_.launch(*pass.measure, launch, bytes, stream);
  }
  device_.launch(*pass.write, launch, bytes, stream);
}

void Quantizer::run_q(const ForwardCall& call, const Fp8Operands& operands, DeviceAddress scratch,
                      Stream stream) const {
  QuantizeParams params = operand(call.problem, call.problem.q, options_.rotary);
  params.rotary.first_keys = operands.target.first_keys;
  params.codes = pointer_to<core::uint8>(operands.q);
  params.q_scale = pointer_to<float>(operands.q_scale);
  run(q_, params, core::fp8_layout(call.problem).batches_q, scratch, stream);
}

void Quantizer::run_keys(const ForwardCall& call, const Fp8Operands& operands,
                         DeviceAddress scratch, Stream stream) const {
  const core::Problem& p = call.problem;
  const int64 batches = core::fp8_layout(p).batches_k;
  QuantizeParams k = operand(p, p.k, options_.rotary);
  k.codes = pointer_to<core::uint8>(operands.k);
  k.key_scale = pointer_to<core::KeyScale>(operands.key_scale);
  k.target = operands.target;
  k.rotary.first_keys = operands.target.first_keys;
  run(k_, k, batches, scratch, stream);
  QuantizeParams v = operand(p, p.v, options_.rotary);
  v.codes = pointer_to<core::uint8>(operands.v);
  v.key_scale = pointer_to<core::KeyScale>(operands.key_scale);
  v.target = operands.target;
  run(v_, v, batches, scratch, stream);
}

void Quantizer::run_rows(const ForwardCall& call, const RowOperands& operands,
                         DeviceAddress scratch, Stream stream) const {
  const core::Problem& p = call.problem;
  const core::Fp8Layout l = core::fp8_layout(p);
  const struct {
    const Pass& pass;
    const core::View& view;
    int64 batches;
    DeviceAddress codes;
    DeviceAddress scale;
  } rows[] = {{q_, p.q, l.batches_q, operands.q, operands.q_scale},
              {k_, p.k, l.batches_k, operands.k, operands.k_scale},
              {v_, p.v, l.batches_k, operands.v, operands.v_scale}};
  for (const auto& row : rows) {
    if (row.codes == 0) continue;
    QuantizeParams params = operand(p, row.view, options_.rotary);
    params.codes = pointer_to<core::uint8>(row.codes);
    params.q_scale = pointer_to<float>(row.scale);
    run(row.pass, params, row.batches, scratch, stream);
  }
}

}  // namespace fovea::runtime

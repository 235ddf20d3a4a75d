#include "runtime/forward_fp8.h"

#include <algorithm>
#include <span>

#include "core/mask.h"
#include "fovea/fovea.hpp"
#include "runtime/source.h"

namespace fovea::runtime {

namespace {

using core::DType;
using core::FwdConfig;
using core::FwdFp8Params;
using core::int32;
using core::int64;
using core::Problem;

struct Dimension {
  int64 extent;
  int64 stride;  // elements; not used for the first
  int32 box;
};

// A map over four or five dimensions, innermost first.
template <std::size_t rank>
core::TensorMap encode(Device& device, MapType type, std::uint64_t element_bytes,
                       DeviceAddress address, const Dimension (&dimensions)[rank],
                       MapSwizzle swizzle) {
  TensorMapSpec spec;
  spec.type = type;
  spec.rank = rank;
  spec.address = address;
  for (std::size_t i = 0; i < rank; ++i) {
    const int64 extent = std::max<int64>(dimensions[i].extent, 1);
    spec.extent[i] = static_cast<std::uint64_t>(extent);
    spec.stride_bytes[i] =
        extent > 1 ? static_cast<std::uint64_t>(dimensions[i].stride) * element_bytes : 16;
    spec.box[i] = static_cast<std::uint32_t>(dimensions[i].box);
  }
  spec.swizzle = swizzle;
  return device.encode_tensor_map(spec);
}

MapSwizzle swizzle_of(int32 pattern) {
  return pattern == 128 ? MapSwizzle::b128 : pattern == 64 ? MapSwizzle::b64 : MapSwizzle::b32;
}

// Steps of codes as rows: those given, or those of dense ones.
CodeSteps steps_or(const CodeSteps& given, int64 rows, int64 columns, int64 heads) {
  return given.row != 0 ? given : CodeSteps{rows * heads * columns, heads * columns, columns};
}

// What the copy engine can write: as forward_gpu.cpp asks of 16-bit tensors.
bool suits_copy_engine(const core::View& out, const int64 (&extent)[3], int64 columns) {
  if (reinterpret_cast<DeviceAddress>(out.data) % 16 != 0 || core::size_bytes(out.dtype) != 2) {
    return false;
  }
  if (out.stride[3] != 1 && columns > 1) return false;
  for (int i = 0; i < 3; ++i) {
    if (extent[i] <= 1) continue;
    if (out.stride[i] <= 0 || out.stride[i] % 8 != 0 || out.stride[i] >= int64{1} << 39) {
      return false;
    }
  }
  return true;
}

}  // namespace

std::vector<std::string> forward_fp8_supports(const Problem& p, std::string_view arch,
                                              DType codes) {
  std::vector<std::string> reasons;
  const auto refuse = [&](bool condition, const std::string& reason) {
    if (condition) reasons.push_back(reason);
  };
  refuse(arch != "sm_90a" && arch != "sm_100a" && arch != "sm_103a",
         "its 8-bit forward kernels are for sm_90a, sm_100a and sm_103a and the device is " +
             std::string(arch));
  // kind::i8 is sm_100a's alone, and sums beside scores in tensor memory would be of two kinds.
  refuse(codes == DType::s8 && arch != "sm_90a",
         "integers (s8) for q and k are Hopper's, sm_90a, and the device is " + std::string(arch) +
             ", so take e4m3");
  refuse(p.head_dim > 256 || p.head_dim_v > 256,
         "it takes head dimensions up to 256 but they are " + std::to_string(p.head_dim) + " and " +
             std::to_string(p.head_dim_v));
  refuse(static_cast<bool>(p.bias), "it has no bias");
  refuse(static_cast<bool>(p.mask), "it has no mask tensor");
  refuse(static_cast<bool>(p.alibi), "it has no ALiBi");
  refuse(p.dropout.probability > 0.0f, "it has no dropout");
  refuse(p.num_splits > 1, "it does not split keys but num_splits is " +
                               std::to_string(p.num_splits) + ", so leave it 0");
  return reasons;
}

ForwardConfig choose_forward_fp8(const Problem& p, core::SoftmaxPolicy softmax,
                                 std::string_view arch, int64 promote_keys, DType codes) {
  if (arch == "sm_90a") return choose_forward_fp8_sm90(p, softmax, promote_keys, codes);
  return choose_forward_fp8_sm100(p, softmax, arch, codes);
}

FwdConfig choose_forward_fp8_sm90(const Problem& p, core::SoftmaxPolicy softmax, int64 promote_keys,
                                  DType codes) {
  FwdConfig c;
  c.dtype = codes;
  c.out_dtype = p.out.dtype;
  c.head_dim = core::fp8_columns(p.head_dim);
  c.head_dim_v = core::round_up(p.head_dim_v, 16);
  c.softmax = softmax;
  c.bound_right = p.window.right >= 0;
  c.bound_left = p.window.left >= 0;
  c.ragged = p.is_varlen_q() || p.is_varlen_k() || p.seqused_q != nullptr || p.seqused_k != nullptr;
  if (p.is_paged()) c.source = core::Source::paged;
  c.has_sink = static_cast<bool>(p.sink);
  if (p.softcap > 0.0f) {
    c.transform = core::ScoreTransform::softcap;
  } else if (!(p.softmax_scale > 0.0f)) {
    c.transform = core::ScoreTransform::scale;
  }
  const int64 extent[3] = {p.is_varlen_q() ? 1 : p.batch, p.is_varlen_q() ? p.total_q : p.seqlen_q,
                           p.heads_q};
  c.tma_out = suits_copy_engine(p.out, extent, p.head_dim_v);
  // What measured best (docs/kernels/fp8.md); the registers of a tile decide what is possible.
  const int32 widest = std::max(c.head_dim, c.head_dim_v);
  const bool plain = c.transform == core::ScoreTransform::none;
  const bool windowed = core::is_windowed(c);
  // Integer products begin at a number, whose registers those of the sums leave no room for.
  const bool crowded = codes == DType::s8 && promote_keys > 0;
  // Sums in fp32 of many columns move under the other warpgroup's products.
  c.ping_pong = widest > 128 && promote_keys > 0;
  if (widest <= 64) {
    c.warpgroups = 3;
    c.tile_k = plain && !(crowded && windowed) ? 128 : 96;
    c.stages = 4;
  } else if (widest <= 128) {
    // Short rows of tiles waste less with narrow ones. Three warpgroups have no registers left for
    // sums in fp32; two have with tiles of 128 keys, but for pages, where they have 232.
    const bool narrow = plain && promote_keys == 0;
    c.warpgroups = narrow ? 3 : 2;
    c.tile_k = narrow ? 96 : 128;
    c.stages = 3;
  } else {
    c.tile_k = 96;
  }
  // With q in registers products read keys alone from shared memory. Integers gain nothing by it,
  // and 232 registers have no room.
  const bool room_for_q =
      widest <= 64 ? promote_keys == 0
                   : widest > 128 && promote_keys > 0 && c.tma_out && c.source == core::Source::tma;
  c.q_in_registers = plain && codes != DType::s8 && room_for_q;
  c.promote = promote_keys > 0 ? 1 : 0;  // decides how much memory there is for keys
  while (core::fp8_shared_bytes(c) > core::shared_limit_bytes && c.tile_k > 32) {
    if (c.promote == 0 && c.out_apart && c.head_dim >= 2 * c.head_dim_v) {
      c.out_apart = false;
    } else {
      c.tile_k -= 32;
    }
  }
  if (promote_keys > 0) {
    c.promote = std::max(1, static_cast<int32>(std::min<int64>(promote_keys, 1 << 20)) / c.tile_k);
  }
  if (p.is_paged()) c.page_keys = core::fp8_page_keys(p.page_size, c.tile_k);
  return c;
}

namespace {

std::string text_of(const FwdConfig& config) {
  KernelSource source;
  source.name = "forward_sm90_" + operand_name(config.dtype, config.head_dim, config.head_dim_v);
  source.include = "device/fwd_fp8_sm90.cuh";
  source.instructions = {wgmma_text({.n = config.tile_k,
                                     .a = config.dtype,
                                     .b = config.dtype,
                                     .a_in_registers = config.q_in_registers},
                                    "fwd_scores"),
                         // Weights are e4m3 whatever the values are.
                         wgmma_text({.n = config.head_dim_v,
                                     .a = DType::e4m3,
                                     .b = core::value_type(config.dtype),
                                     .a_in_registers = true},
                                    "fwd_output")};
  source.call = "fovea::device::fwd_fp8<" + forward_expression(config) + ">";
  source.params = "fovea::core::FwdFp8Params";
  source.threads = core::threads_of(config);
  return kernel_text(source);
}

std::string text_of(const core::Fwd100Config& config) { return forward_text(config); }

int32 shared_bytes_of(const FwdConfig& c) { return core::fp8_shared_bytes(c); }
int32 shared_bytes_of(const core::Fwd100Config& c) { return core::shared_bytes(c); }

// Rows of a box of q, and of a tile of keys; bytes of a row of them under their swizzle.
int32 query_box(const FwdConfig& c) { return core::rows_of(c); }
int32 query_box(const core::Fwd100Config& c) { return core::query_box_rows(c); }
int32 key_box(const FwdConfig& c) { return c.page_keys > 0 ? c.page_keys : c.tile_k; }
int32 key_box(const core::Fwd100Config& c) { return core::key_rows_of(c); }
// Columns of a box of values.
int32 value_box(const FwdConfig& c) { return c.head_dim_v; }
int32 value_box(const core::Fwd100Config& c) { return core::value_columns_of(c); }

// Keys in a row of a panel of values.
int32 value_pattern(const FwdConfig& c) { return core::pattern_bytes(key_box(c)); }
int32 value_pattern(const core::Fwd100Config& c) { return core::pattern_bytes(c.tile_k); }

bool is_packed(const FwdConfig&) { return false; }
bool is_packed(const core::Fwd100Config& c) { return c.packed; }

}  // namespace

std::string forward_fp8_text(const ForwardConfig& config) {
  return std::visit([](const auto& c) { return text_of(c); }, config);
}

ForwardFp8Kernel::ForwardFp8Kernel(Device& device, const ForwardConfig& config, Jit& jit,
                                   bool tolerates_spills)
    : device_(device), config_(config) {
  CompileRequest request;
  request.text = forward_fp8_text(config);
  request.arch = device.properties().arch;
  request.format = device.properties().image_format;
  request.strict = !tolerates_spills;
  compiled_ = jit.compile(request);
  kernel_ = device.load(compiled_.image->bytes, kernel_name(request.text));
}

void ForwardFp8Kernel::run(const ForwardCall& call, const Fp8Operands& operands,
                           Stream stream) const {
  std::visit([&](const auto& config) { launch(config, call, operands, stream); }, config_);
}

template <typename Config>
void ForwardFp8Kernel::launch(const Config& config, const ForwardCall& call,
                              const Fp8Operands& operands, Stream stream) const {
  const Problem& p = call.problem;
  const core::Fp8Layout l = core::fp8_layout(p);
  const core::Fp8Layout keys = p.is_paged() ? core::fp8_layout(core::pages_as_sequences(p)) : l;
  FwdFp8Params params;
  const ForwardTiles tiles = fill_forward_params(params, call, config, device_.properties());
  if (tiles.ctas == 0) return;

  const int32 pattern = core::pattern_bytes(config.head_dim);
  const CodeSteps q = steps_or(operands.q_steps, l.rows_q, l.columns, l.heads_q);
  const CodeSteps k = steps_or(operands.k_steps, keys.rows_k, keys.columns, keys.heads_kv);
  if (is_packed(config)) {
    params.q = encode(device_, MapType::u8, 1, operands.q,
                      {{l.columns, 1, pattern},
                       {p.group_size(), q.head, p.group_size()},
                       {l.rows_q, q.row, query_box(config) / p.group_size()},
                       {l.heads_kv, p.group_size() * q.head, 1},
                       {l.batches_q, q.batch, 1}},
                      swizzle_of(pattern));
  } else {
    params.q = encode(device_, MapType::u8, 1, operands.q,
                      {{l.columns, 1, pattern},
                       {l.rows_q, q.row, query_box(config)},
                       {l.heads_q, q.head, 1},
                       {l.batches_q, q.batch, 1}},
                      swizzle_of(pattern));
  }
  params.k = params.v = params.q;
  if (keys.k_bytes > 0) {
    params.k = encode(device_, MapType::u8, 1, operands.k,
                      {{keys.columns, 1, pattern},
                       {keys.rows_k, k.row, key_box(config)},
                       {keys.heads_kv, k.head, 1},
                       {keys.batches_k, k.batch, 1}},
                      swizzle_of(pattern));
    const int32 pattern_v = value_pattern(config);
    const int64 places = keys.blocks_k * core::scale_block;
    CodeSteps v = operands.v_steps;
    if (v.row == 0) v = {places * l.columns_v * l.heads_kv, places, places * l.columns_v};
    params.v = encode(device_, MapType::u8, 1, operands.v,
                      {{places, 1, pattern_v},
                       {keys.columns_v, v.row, value_box(config)},
                       {keys.heads_kv, v.head, 1},
                       {keys.batches_k, v.batch, 1}},
                      swizzle_of(pattern_v));
  }
  if (config.tma_out) {
    params.out_map = encode(device_, p.out.dtype == DType::bf16 ? MapType::bf16 : MapType::f16, 2,
                            reinterpret_cast<DeviceAddress>(p.out.data),
                            {{p.head_dim_v, 1, core::panel_columns},
                             {l.rows_q, p.out.stride[1], core::out_box_rows(config)},
                             {l.heads_q, p.out.stride[2], 1},
                             {l.batches_q, p.out.stride[0], 1}},
                            MapSwizzle::b128);
  }
  params.k_rows.data = reinterpret_cast<const core::uint16*>(operands.k);
  params.k_rows.stride[0] = k.batch;
  params.k_rows.stride[1] = k.row;
  params.k_rows.stride[2] = k.head;
  params.q_scale = reinterpret_cast<const float*>(operands.q_scale);
  params.q_scale_stride[0] = l.blocks_q * l.heads_q;
  params.q_scale_stride[1] = l.blocks_q;
  params.key_scale = reinterpret_cast<const core::KeyScale*>(operands.key_scale);
  params.key_scale_stride[0] = keys.blocks_k * keys.heads_kv;
  params.key_scale_stride[1] = keys.blocks_k;

  LaunchConfig shape;
  shape.grid.x = tiles.ctas;
  shape.block.x = tiles.threads;
  shape.cluster.x = static_cast<std::uint32_t>(core::ctas_of(config));
  shape.dynamic_shared_bytes = static_cast<std::uint32_t>(shared_bytes_of(config));
  device_.launch(*kernel_, shape, std::as_bytes(std::span(&params, 1)), stream);
}

}  // namespace fovea::runtime

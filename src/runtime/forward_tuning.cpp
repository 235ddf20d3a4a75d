#include "runtime/forward_tuning.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

#include "core/config_sm100.h"
#include "core/fp8.h"
#include "fovea/device.hpp"
#include "runtime/eight_bits.h"
#include "runtime/forward_fp8.h"
#include "runtime/gather_pages.h"
#include "runtime/plan.h"
#include "runtime/problem.h"
#include "runtime/settings.h"
#include "runtime/staging.h"
#include "runtime/text.h"

namespace fovea::runtime {

namespace {

using core::Fwd100Config;
using core::FwdConfig;
using core::int32;

template <typename Config>
struct Field {
  std::string_view name;
  int32 Config::*number = nullptr;
  bool Config::*flag = nullptr;
  // Of a switch of the schedule, on which results do not depend: its two values.
  int32 low = 0;
  int32 high = 0;

  bool is_switch() const { return low != high; }
  int32 get(const Config& c) const { return number != nullptr ? c.*number : int32{c.*flag}; }
  void set(Config& c, int32 value) const {
    if (number != nullptr) c.*number = value;
    if (flag != nullptr) c.*flag = value != 0;
  }
  Config flipped(Config c) const {
    set(c, get(c) == low ? high : low);
    return c;
  }
};

// Of some configurations a switch changes nothing.
template <typename Config>
bool is_idle(const Field<Config>& field, const Config& c) {
  return field.is_switch() && forward_expression(field.flipped(c)) == forward_expression(c);
}

constexpr std::array<Field<FwdConfig>, 13> fields_of(const FwdConfig*) {
  return {{{"warpgroups", &FwdConfig::warpgroups},
           {"tile_k", &FwdConfig::tile_k},
           {"stages", &FwdConfig::stages},
           {"out_apart", nullptr, &FwdConfig::out_apart, 0, 1},
           {"out_direct", nullptr, &FwdConfig::out_direct, 0, 1},
           {"persistent", nullptr, &FwdConfig::persistent, 0, 1},
           {"tail", nullptr, &FwdConfig::tail, 0, 1},
           {"ping_pong", nullptr, &FwdConfig::ping_pong, 0, 1},
           {"overlap", nullptr, &FwdConfig::overlap, 0, 1},
           {"short_first", nullptr, &FwdConfig::short_first, 0, 1},
           {"reads_once", nullptr, &FwdConfig::reads_once, 0, 1},
           {"looks_ahead", nullptr, &FwdConfig::looks_ahead, 0, 1},
           {"q_in_registers", nullptr, &FwdConfig::q_in_registers, 0, 1}}};
}

constexpr std::array<Field<Fwd100Config>, 9> fields_of(const Fwd100Config*) {
  return {{{"query_tiles", &Fwd100Config::query_tiles},
           {"stages", &Fwd100Config::stages},
           {"first_part", &Fwd100Config::first_part},
           {"polynomial", &Fwd100Config::polynomial},
           {"polynomial_degree", &Fwd100Config::polynomial_degree},
           {"out_apart", nullptr, &Fwd100Config::out_apart, 0, 1},
           {"persistent", nullptr, &Fwd100Config::persistent, 0, 1},
           {"cta_pair", nullptr, &Fwd100Config::cta_pair, 0, 1},
           {"launch_control", nullptr, &Fwd100Config::launch_control, 0, 1}}};
}

template <typename Config>
constexpr auto fields() {
  return fields_of(static_cast<const Config*>(nullptr));
}

template <typename Config>
void set_field(Config& config, std::string_view name, std::string_view value) {
  std::string known;
  for (const auto& field : fields<Config>()) {
    known += (known.empty() ? "" : ", ") + std::string(field.name);
    if (field.name != name) continue;
    int32 number = 0;
    const auto parsed = std::from_chars(value.data(), value.data() + value.size(), number);
    require(parsed.ec == std::errc() && parsed.ptr == value.data() + value.size() && number >= 0 &&
                (field.flag == nullptr || number <= 1),
            "configuration gives ", name, " the value '", value, "'; it must be ",
            field.flag != nullptr ? "0 or 1" : "a number from 0 on");
    field.set(config, number);
    return;
  }
  throw Error(text("configuration names '", name, "'; this kernel has ", known));
}

// Registers of a thread that addresses and loop state take, beside a tile: FlashAttention-3's tile
// table fits 24 with two computing warpgroups and 32 with three.
constexpr int32 other_registers(const FwdConfig& c) { return c.warpgroups == 3 ? 32 : 24; }

std::string objection_in_eight_bits(const FwdConfig& c) {
  if (c.warpgroups < 2) return "it has 2 or 3 warpgroups in 8 bits";
  if (c.tile_k % core::scale_block != 0) return "tile_k is a multiple of 32 in 8 bits";
  if (c.out_direct) return "out is staged in 8 bits";
  if (!c.out_apart && c.promote > 0) return "out is staged where the sums were, so out_apart is 1";
  const int32 bytes = core::fp8_shared_bytes(c);
  if (bytes > core::shared_limit_bytes) {
    return text("it needs ", bytes, " bytes of shared memory of ", core::shared_limit_bytes);
  }
  return {};
}

std::string objection(const FwdConfig& c) {
  if (c.warpgroups < 1 || c.warpgroups > 3) return "it has 1 to 3 warpgroups";
  if (c.warpgroups == 1 && c.ping_pong) return "turns need two warpgroups that take them";
  if (c.tile_k < 16 || c.tile_k > 256 || c.tile_k % 16 != 0) {
    return "tile_k is a multiple of 16 in 16..256";
  }
  if (c.stages < 2 || c.stages > 8) return "it has 2 to 8 stages";
  if (c.out_direct && (c.out_apart || !c.tma_out || c.head_dim_v % 32 != 0)) {
    return "out is stored directly in whole chunks, where it is not staged apart";
  }
  if (c.tail && !core::may_have_tail(c)) return "a tail needs tiles that take equally long";
  if (core::is_eight_bit(c.dtype)) return objection_in_eight_bits(c);
  if (c.q_in_registers) return "q stays in shared memory in 16 bits";
  if (!c.out_apart && c.tma_out && c.head_dim < c.head_dim_v) return "out does not fit where q was";
  const int32 bytes = core::shared_bytes(c);
  if (bytes > core::shared_limit_bytes) {
    return text("it needs ", bytes, " bytes of shared memory of ", core::shared_limit_bytes);
  }
  const int32 room = core::consumer_registers(c) - other_registers(c);
  if (core::tile_registers(c) > room) {
    return text("its tile needs ", core::tile_registers(c), " registers of ", room);
  }
  return {};
}

std::string objection(const Fwd100Config& c) {
  if (c.query_tiles < 1 || c.query_tiles > 2) return "it has 1 or 2 query tiles";
  if (c.stages < 2) return "it has at least 2 stages";
  if (c.polynomial > 16) return "polynomial counts exponentials of 16";
  if (c.cta_pair && !(core::is_dense(c) && c.head_dim_v % 128 == 0)) {
    return "CTA pairs take keys that all rows see, in one piece, and head_dim_v 128 or 256";
  }
  if (!c.out_apart && core::row_bytes_of(c) < core::out_row_bytes_of(c)) {
    return "out does not fit where q was";
  }
  if (core::is_eight_bit(c) && c.stages > core::most_stages_fp8) {
    return text("in 8 bits it has at most ", core::most_stages_fp8, " stages");
  }
  if (c.launch_control && !c.persistent) return "launch_control hands tiles to persistent CTAs";
  const int32 bytes = core::shared_bytes(c);
  if (bytes > core::shared_limit_bytes) {
    return text("it needs ", bytes, " bytes of shared memory of ", core::shared_limit_bytes);
  }
  return {};
}

void add_candidates(const FwdConfig& chosen, std::vector<ForwardConfig>& list) {
  // One is for few rows alone, and takes no turns.
  const std::vector<int32> counts =
      chosen.warpgroups == 1 ? std::vector<int32>{1} : std::vector<int32>{2, 3};
  for (const int32 warpgroups : counts) {
    for (int32 tile_k = 176; tile_k >= 48; tile_k -= 16) {
      for (const int32 stages : {6, 4, 3, 2}) {
        if (stages > 4 && warpgroups > 1) continue;
        for (const bool out_apart : {true, false}) {
          FwdConfig c = chosen;
          c.warpgroups = warpgroups;
          c.tile_k = tile_k;
          c.stages = stages;
          c.out_apart = out_apart;
          c.out_direct = chosen.out_direct && !out_apart;
          list.emplace_back(c);
        }
      }
    }
  }
}

void add_candidates(const Fwd100Config& chosen, std::vector<ForwardConfig>& list) {
  for (const int32 query_tiles : {2, 1}) {
    for (const int32 polynomial : {0, 2, 4, 6}) {
      for (const int32 stages : {5, 4, 3, 2}) {
        Fwd100Config c = chosen;
        c.query_tiles = query_tiles;
        c.polynomial = polynomial;
        c.stages = stages;
        list.emplace_back(c);
      }
    }
  }
}

model::ForwardShape shape_of(const FwdConfig& c) {
  // Counters of the three policies: docs/kernels/fwd_sm90.md.
  const bool guarded = c.softmax == core::SoftmaxPolicy::sum_guard;
  return {.rows = core::rows_of(c),
          .tile_rows = 64,
          .keys = c.tile_k,
          .head_dim = c.head_dim,
          .head_dim_v = c.head_dim_v,
          .element_bytes = core::size_bytes(c.dtype),
          .instructions = guarded ? 2.8 : 4.0};
}

model::ForwardShape shape_of(const Fwd100Config& c) {
  // Packed multiply-adds and sums, a conversion for two and the exponential are 2.5 instructions a
  // score, a maximum half of one. A polynomial takes half a packed instruction for each degree and
  // one and a half beside, bounds, shift and addition about two of the ALU, and spares the special
  // function unit's: counted in the machine code (docs/kernels/fwd_sm100.md). With a maximum scores
  // are read twice. An online one grows at nearly every step in one of a warp's 32 rows.
  const double share = c.polynomial / 16.0;
  const double degree = c.polynomial_degree;
  const bool guarded = c.softmax == core::SoftmaxPolicy::sum_guard;
  const double maximum = guarded || c.max_with_load ? 0.0 : 0.5;
  return {.rows = core::rows_of(c),
          .tile_rows = 128,
          .keys = c.tile_k,
          .head_dim = c.head_dim,
          .head_dim_v = c.head_dim_v,
          .element_bytes = core::size_bytes(c.dtype),
          .special_share = 1.0 - share,
          .instructions = 2.8 + maximum + (2.75 + 0.5 * degree) * share,
          .fma_lanes = 2.0 + (3.0 + degree) * share,
          .alu_lanes = 0.5 + maximum + 1.75 * share,
          .ctas = core::ctas_of(c),
          .score_reads = guarded ? 1.0 : 2.0,
          .rescales = c.softmax == core::SoftmaxPolicy::online ? 1.0 : 0.0};
}

std::string describe(const model::StepCycles& step) {
  return text(step.tensor, " cycles of tensor cores, ", step.exponential, " exponentials, ",
              step.issue, " issue, ", step.fma, " FMA, ", step.alu, " ALU, ", step.shared,
              " shared memory, ", step.copy, " copies from L2",
              step.tensor_memory > 0.0 ? text(", ", step.tensor_memory, " tensor memory") : "");
}

// What a step would take with one technique of the kernel changed.
std::string techniques(const FwdConfig&, const model::Gpu&) { return {}; }

std::string techniques(const Fwd100Config& chosen, const model::Gpu& gpu) {
  using core::SoftmaxPolicy;
  std::string result;
  const auto line = [&](std::string_view name, const Fwd100Config& c) {
    if (c == chosen) return;
    const model::StepCycles step = model::forward_step(gpu, shape_of(c));
    result += text("but        ", name, ": ", step.bound(), " cycles, bound by ", step.binding(),
                   ", softmax ", step.softmax(), " (", describe(step), ")\n");
  };
  const auto changed = [&](const auto& change) {
    Fwd100Config c = chosen;
    change(c);
    return c;
  };
  for (const int32 share : {0, 2, 4, 7}) {
    line(text(share, " of 16 exponentials by polynomial"),
         changed([share](Fwd100Config& c) { c.polynomial = share; }));
  }
  line("no running maximum",
       changed([](Fwd100Config& c) { c.softmax = SoftmaxPolicy::sum_guard; }));
  line("a running maximum, rescaled where it has grown by 2^8",
       changed([](Fwd100Config& c) { c.softmax = SoftmaxPolicy::conditional; }));
  line("a running maximum, rescaled always",
       changed([](Fwd100Config& c) { c.softmax = SoftmaxPolicy::online; }));
  line("each CTA by itself", changed([](Fwd100Config& c) { c.cta_pair = false; }));
  if (core::is_dense(chosen) && chosen.head_dim_v % 128 == 0) {
    line("CTA pairs", changed([](Fwd100Config& c) { c.cta_pair = true; }));
  }
  return result;
}

}  // namespace

void override_forward(ForwardConfig& config, std::string_view text_given) {
  if (text_given.empty()) return;
  for_each_setting(text_given, [&](std::string_view name, std::string_view value) {
    std::visit([&](auto& c) { set_field(c, name, value); }, config);
  });
  const std::string fault = forward_objection(config);
  require(fault.empty(), "configuration is ", text_given, ", but ", fault);
}

std::string forward_fields(const ForwardConfig& config) {
  return std::visit(
      [](const auto& c) {
        std::string result;
        for (const auto& field : fields<std::decay_t<decltype(c)>>()) {
          if (is_idle(field, c)) continue;
          result += text(result.empty() ? "" : ",", field.name, "=", field.get(c));
        }
        return result;
      },
      config);
}

std::string forward_objection(const ForwardConfig& config) {
  return std::visit([](const auto& c) { return objection(c); }, config);
}

model::ForwardShape forward_shape(const ForwardConfig& config) {
  return std::visit([](const auto& c) { return shape_of(c); }, config);
}

std::vector<ForwardConfig> forward_candidates(const ForwardConfig& chosen) {
  std::vector<ForwardConfig> list;
  std::visit([&](const auto& c) { add_candidates(c, list); }, chosen);
  if (std::ranges::find(list, chosen) == list.end()) list.push_back(chosen);
  return list;
}

std::vector<ForwardConfig> leaner_forwards(const ForwardConfig& chosen) {
  std::vector<ForwardConfig> list;
  const auto* hopper = std::get_if<FwdConfig>(&chosen);
  if (hopper == nullptr) return list;
  FwdConfig c = *hopper;
  if (std::exchange(c.looks_ahead, false)) list.emplace_back(c);
  // Two warpgroups have half as many registers again for each thread as three. Packed heads stay
  // as they are: how many fit depends on the rows of a tile.
  if (c.warpgroups == 3 && !c.packed) {
    c.warpgroups = 2;
    list.emplace_back(c);
  }
  for (const int32 tile_k : {96, 64, 48, 32}) {
    if (tile_k >= c.tile_k) continue;
    c.tile_k = tile_k;
    list.emplace_back(c);
  }
  return list;
}

std::vector<ForwardConfig> forward_ablations(const ForwardConfig& chosen) {
  std::vector<ForwardConfig> list{chosen};
  std::visit(
      [&](const auto& c) {
        for (const auto& field : fields<std::decay_t<decltype(c)>>()) {
          if (!field.is_switch() || is_idle(field, c)) continue;
          const auto changed = field.flipped(c);
          if (objection(changed).empty()) list.emplace_back(changed);
        }
      },
      chosen);
  return list;
}

namespace {

// A problem as a chip that need not be here would get it.
struct Target {
  const model::Gpu& chip;
  core::Problem problem;
  ForwardConfig chosen;
};

Target target_for(const Problem& problem, const Options& options, std::string_view chip) {
  const model::Gpu* gpu = model::find_gpu(chip);
  std::string known;
  for (const model::Gpu& each : model::gpus()) {
    known += (known.empty() ? "" : ", ") + std::string(each.name);
  }
  require(gpu != nullptr, "gpu is '", chip, "'; the model knows ", known);
  const core::Problem validated = validate(problem);
  const Problem there = problem.memory == Memory::host ? staged_layout(problem) : problem;
  const core::Problem seen =
      translate(there, {validated.batch, validated.seqlen_q, validated.seqlen_k});
  const bool eight_bits = in_eight_bits(validated, options);
  if (eight_bits && gpu->arch == "sm_90a") {
    throw Unsupported(
        "the model of " + std::string(chip) +
        " has 16-bit kernels alone; a plan for device emulated:sm_90a explains 8 bits");
  }
  const EightBits bits = options.eight_bits.value_or(EightBits{});
  const core::DType codes = core::code_type(seen.q.dtype, quantize_options(bits.quantization));
  const std::vector<std::string> reasons =
      eight_bits ? forward_fp8_supports(seen, gpu->arch, codes) : forward_supports(seen, gpu->arch);
  if (!reasons.empty()) {
    throw Unsupported(
        text("the kernels of ", chip, " do not compute this problem: ", reasons.front()));
  }
  const core::SoftmaxPolicy softmax = softmax_policy(options.softmax);
  if (eight_bits) {
    return {*gpu, seen, choose_forward_fp8_sm100(gathered(seen), softmax, gpu->arch, codes)};
  }
  return {*gpu, seen, choose_forward(seen, softmax, gpu->arch, gpu->sm_count)};
}

}  // namespace

}  // namespace fovea::runtime

namespace fovea {

using namespace runtime;

std::vector<Configuration> configurations(const Problem& problem, const Options& options,
                                          std::string_view chip) {
  const Target target = target_for(problem, options, chip);
  std::vector<Configuration> list;
  for (const ForwardConfig& config : forward_candidates(target.chosen)) {
    const model::ForwardShape shape = forward_shape(config);
    list.push_back({forward_fields(config), model::forward_ms(target.chip, shape, target.problem),
                    std::string(model::forward_step(target.chip, shape).binding()),
                    config == target.chosen, forward_objection(config)});
  }
  std::ranges::stable_sort(list, [](const Configuration& a, const Configuration& b) {
    if (a.refusal.empty() != b.refusal.empty()) return a.refusal.empty();
    return a.model_ms < b.model_ms;
  });
  return list;
}

std::vector<std::string> ablations(const Problem& problem, const Options& options,
                                   std::string_view chip) {
  std::vector<std::string> list;
  for (const ForwardConfig& config : forward_ablations(target_for(problem, options, chip).chosen)) {
    list.push_back(forward_fields(config));
  }
  return list;
}

std::string explain(const Problem& problem, const Options& options, std::string_view chip) {
  const Target target = target_for(problem, options, chip);
  const model::StepCycles step = model::forward_step(target.chip, forward_shape(target.chosen));
  std::string result =
      text("gpu        ", target.chip.name, ", ", target.chip.sm_count, " multiprocessors, ",
           target.chip.arch, "\nsources    ", target.chip.sources, "\nchosen     ",
           forward_fields(target.chosen), "\nmodel      ",
           model::forward_ms(target.chip, forward_shape(target.chosen), target.problem),
           " ms, bound by ", step.binding(), "\nstep       ", step.bound(), " cycles, softmax ",
           step.softmax(), ": ", describe(step), "\n");
  result += std::visit([&](const auto& c) { return techniques(c, target.chip); }, target.chosen);
  constexpr std::size_t shown = 8;
  std::size_t refused = 0;
  std::size_t listed = 0;
  for (const Configuration& c : configurations(problem, options, chip)) {
    if (!c.refusal.empty()) {
      if (refused++ < shown / 2) result += text("not        ", c.text, ": ", c.refusal, "\n");
    } else if (listed++ < shown) {
      result += text("candidate  ", c.text, ": ", c.model_ms, " ms, ", c.binding,
                     c.chosen ? ", chosen\n" : "\n");
    }
  }
  return result +
         text("of         ", listed, " legal configurations and ", refused, " without room\n");
}

}  // namespace fovea

#include "runtime/fp8_program.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "runtime/devices.h"
#include "runtime/eight_bits.h"
#include "runtime/forward_fp8.h"
#include "runtime/forward_tuning.h"
#include "runtime/gather_pages.h"
#include "runtime/plan.h"
#include "runtime/text.h"

namespace fovea::runtime::fp8_program {

namespace {

using core::int64;

constexpr std::size_t aligned(int64 bytes) {
  return (static_cast<std::size_t>(bytes) + 255) / 256 * 256;
}

CodeSteps steps_of(const core::View& view) {
  return {view.stride[0], view.stride[1], view.stride[2]};
}

// Codes that the copy engine reads where they are: contiguous columns, whole steps of the products,
// and strides that are multiples of 16 bytes.
bool reads_in_place(const core::View& view, const int64 (&extent)[3], int64 columns) {
  if (!core::is_eight_bit(view.dtype) || columns != core::fp8_columns(static_cast<int>(columns)) ||
      view.stride[3] != 1 || reinterpret_cast<DeviceAddress>(view.data) % 16 != 0) {
    return false;
  }
  for (int i = 0; i < 3; ++i) {
    const int64 stride = view.stride[i];
    if (extent[i] > 1 && (stride <= 0 || stride % 16 != 0 || stride >= int64{1} << 40)) {
      return false;
    }
  }
  return true;
}

// Scales (batch, head, block) as the kernel takes those of q.
bool scales_in_place(const core::Problem& p, const core::Fp8Layout& l) {
  const core::View& s = p.q_scale;
  const auto fits = [](int64 stride, int64 right, int64 extent) {
    return stride == right || extent <= 1;
  };
  return static_cast<bool>(s) && p.q_scale_heads == 1 && fits(s.stride[2], 1, l.blocks_q) &&
         fits(s.stride[1], l.blocks_q, l.heads_q) &&
         fits(s.stride[0], l.blocks_q * l.heads_q, l.batches_q);
}

// What is read where the caller has it, or copied from there; the rest is made in front of the
// kernel.
struct InPlace {
  explicit InPlace(const core::Problem& p) {
    const core::Fp8Layout l = core::fp8_layout(p);
    q = reads_in_place(p.q, {l.batches_q, l.rows_q, l.heads_q}, p.head_dim);
    q_scale = q && scales_in_place(p, l);
    // Pages whose values lie in rows are gathered: all that is left to save is the keys' half.
    pages = core::has_quantized_pages(p);
    const int64 pool[] = {p.pages, p.page_size, l.heads_kv};
    const int64 rows[] = {l.batches_k, l.rows_k, l.heads_kv};
    k = pages == p.is_paged() && reads_in_place(p.k, pages ? pool : rows, p.head_dim);
    // A transposed v and its scales are as the kernel takes them, once its rows are aligned.
    const core::View& v = p.v;
    values = k && p.v_transposed && reinterpret_cast<DeviceAddress>(v.data) % 16 == 0 &&
             reinterpret_cast<DeviceAddress>(p.k_scale.data) % 16 == 0 && v.stride[3] > 0 &&
             v.stride[2] % 16 == 0 && v.stride[0] % 16 == 0 && v.stride[3] % 16 == 0;
  }
  bool operator==(const InPlace&) const = default;

  QuantizeParts parts() const {
    const Quantize of_q = q_scale ? Quantize::none : q ? Quantize::scales : Quantize::codes;
    if (values) return {of_q, Quantize::none, Quantize::none};
    return {of_q, k ? Quantize::scales : Quantize::codes, Quantize::codes};
  }

  bool pages = false;  // are as a quantiser writes them
  bool q = false;
  bool q_scale = false;
  bool k = false;
  bool values = false;  // and the scales of k and v
};

// Where the operands lie: with the caller, or one behind the other from a first address on.
struct Places {
  // Keys and values are copied where pages are gathered.
  Places(const core::Problem& p, InPlace in_place, bool gathers, DeviceAddress first) {
    const core::Fp8Layout l = core::fp8_layout(p);
    if (gathers) in_place.k = in_place.values = false;
    const auto place = [&](bool is_there, const void* data, int64 bytes) {
      if (is_there) return reinterpret_cast<DeviceAddress>(data);
      const DeviceAddress address = first;
      first += aligned(bytes);
      return address;
    };
    operands.q = place(in_place.q, p.q.data, l.q_bytes);
    operands.q_scale = place(in_place.q_scale, p.q_scale.data, l.q_scale_bytes);
    operands.k = place(in_place.k, p.k.data, l.k_bytes);
    operands.v = place(in_place.values, p.v.data, l.v_bytes);
    operands.key_scale = place(in_place.values, p.k_scale.data, l.key_scale_bytes);
    if (in_place.q) operands.q_steps = steps_of(p.q);
    if (in_place.k) operands.k_steps = steps_of(p.k);
    if (in_place.values) operands.v_steps = {p.v.stride[0], p.v.stride[3], p.v.stride[2]};
    end = first;
  }
  Fp8Operands operands;
  DeviceAddress end;
};

int shared_bytes_of(const core::FwdConfig& c) { return core::fp8_shared_bytes(c); }
int shared_bytes_of(const core::Fwd100Config& c) { return core::shared_bytes(c); }

std::string sums_of(const core::FwdConfig& c) {
  return c.promote == 0 ? std::string("in the tensor cores alone")
                        : text("in fp32 every ", c.promote * c.tile_k, " keys");
}
std::string sums_of(const core::Fwd100Config&) { return "in fp32, in tensor memory"; }

template <typename Config>
std::string explain_kernel(const Config& c) {
  return text("tiles      ", core::rows_of(c), " rows x ", c.tile_k, " keys, ", core::threads_of(c),
              " threads, ", shared_bytes_of(c), " bytes of shared memory\n", "sums       ",
              sums_of(c), "\n",  //
              "softmax    ", policy_name(c.softmax), "\n", "config     ", forward_expression(c),
              "\n");
}

// What becomes of pages in front of the kernel.
struct Pages {
  const char* text = "";  // of explain(); empty: there are none
  std::string why = {};
  bool are_sequences = true;                        // for the kernel
  std::shared_ptr<const GatherKernel> gather = {};  // of quantised ones; else a quantiser does
};

class Fp8Program final : public GpuProgram {
 public:
  Fp8Program(std::shared_ptr<const ForwardFp8Kernel> kernel, const core::Problem& problem,
             Device& device, const core::QuantizeOptions& options, Pages pages)
      : kernel_(std::move(kernel)),
        pages_(std::move(pages)),
        in_place_(problem),
        quantizer_(device, problem, options, in_place_.parts(), true),
        scratch_bytes_(places(problem, 0).end + quantizer_.scratch_bytes(problem)) {}

  // The counters that hand out tiles.
  std::size_t zeroed_bytes() const override { return 2 * sizeof(core::uint32); }
  // The operands that are made.
  std::size_t scratch_bytes() const override { return scratch_bytes_; }

  void run(const core::Problem& problem, const GpuCall& call) const override {
    require(InPlace(problem) == in_place_ && quantizer_.suits(problem),
            "q, k or v is laid out in another way than when the plan was made, which decided by"
            " strides and alignments what to read in place; plan again");
    const Places places = this->places(problem, call.scratch);
    ForwardCall forward{.problem = problem,
                        .scheduler = call.zeroed,
                        .workspace = 0,
                        .counters = call.counters,
                        .trace = {}};
    quantizer_.run_q(forward, places.operands, places.end, call.stream);
    quantizer_.run_keys(forward, places.operands, places.end, call.stream);
    if (pages_.gather != nullptr) pages_.gather->run(problem, places.operands, call.stream);
    if (pages_.are_sequences) forward.problem = gathered(problem);
    kernel_->run(forward, places.operands, call.stream);
  }

  std::string explain() const override {
    const auto made = [](bool codes, bool scales) {
      return codes    ? "read in place"
             : scales ? "read in place, scales brought together"
                      : "written";
    };
    const QuantizeParts parts = in_place_.parts();
    const bool copied = pages_.gather != nullptr;
    std::string pages = pages_.text;
    if (!pages.empty()) pages = text("pages      ", pages, ": ", pages_.why, "\n");
    return pages +
           text("operands   q ", made(parts.q == Quantize::none, parts.q == Quantize::scales),
                ", k ",
                copied ? "copied" : made(parts.k == Quantize::none, parts.k == Quantize::scales),
                ", v ", copied ? "copied" : made(parts.v == Quantize::none, false), " (",
                scratch_bytes_, " bytes)\n") +
           std::visit([](const auto& c) { return explain_kernel(c); }, kernel_->config());
  }

 private:
  Places places(const core::Problem& problem, DeviceAddress first) const {
    return {problem, in_place_, pages_.gather != nullptr, first};
  }

  std::shared_ptr<const ForwardFp8Kernel> kernel_;
  Pages pages_;
  InPlace in_place_;
  Quantizer quantizer_;
  std::size_t scratch_bytes_;
};

// The configuration, and those that need fewer registers where the kernel has them: q in shared
// memory, then narrower tiles.
std::vector<ForwardConfig> narrower(const ForwardConfig& chosen) {
  std::vector<ForwardConfig> list{chosen};
  if (const auto* hopper = std::get_if<core::FwdConfig>(&chosen)) {
    core::FwdConfig c = *hopper;
    if (std::exchange(c.q_in_registers, false)) list.emplace_back(c);
    for (c.tile_k -= core::scale_block; c.tile_k >= core::scale_block;
         c.tile_k -= core::scale_block) {
      if (c.page_keys > 0) c.page_keys = core::fp8_page_keys(hopper->page_keys, c.tile_k);
      list.emplace_back(c);
    }
  }
  return list;
}

// The kernel of the first of these that fits the registers. Where none does, one that spills: slow,
// but right.
std::shared_ptr<const ForwardFp8Kernel> fitting_kernel(Device& device,
                                                       const ForwardConfig& chosen) {
  for (const ForwardConfig& config : narrower(chosen)) {
    try {
      return std::make_shared<const ForwardFp8Kernel>(device, config);
    } catch (const CompileError&) {
      continue;
    }
  }
  return std::make_shared<const ForwardFp8Kernel>(device, chosen, default_jit(), true);
}

}  // namespace

std::vector<std::string> supports(const core::Problem& problem, const GpuTarget& target) {
  if (in_eight_bits(problem, target.options)) {
    const core::QuantizeOptions quantization =
        quantize_options(target.options.eight_bits.value_or(EightBits{}).quantization);
    std::vector<std::string> reasons =
        forward_fp8_supports(problem, target.arch, core::code_type(problem.q.dtype, quantization));
    if (reasons.empty()) reasons = quantization_objections(problem);
    if (core::has_quantized_pages(problem) && !InPlace(problem).values) {
      reasons.emplace_back(
          "it takes quantised pages of two or more columns of v and with strides"
          " below 2^40 bytes");
    }
    return reasons;
  }
  // The nearest kernel is the 16-bit one: its reasons, and one more.
  std::vector<std::string> reasons = forward_supports(problem, target.arch);
  reasons.emplace_back("its 8-bit kernel computes only when options.eight_bits asks for it");
  return reasons;
}

namespace {

struct Choice {
  ForwardConfig config;
  Pages pages;
};

Pages gathering_pages(Device& device, std::string why) {
  static auto* const kernels = new SharedPrograms<GatherKernel>;
  return {.text = "gathered in front of every run",
          .why = std::move(why),
          .gather = kernels->get(device, "",
                                 [&] { return std::make_shared<const GatherKernel>(device); })};
}

// "gather=0" or "gather=1" among the fields set by hand, which is taken out of them.
std::optional<bool> take_gather(std::string& fields) {
  constexpr std::string_view name = ",gather=";
  std::string rest = "," + fields + ",";
  const std::size_t at = rest.find(name);
  if (at == std::string::npos) return std::nullopt;
  const std::size_t begin = at + name.size();
  const std::size_t end = rest.find(',', begin);
  const std::string value = rest.substr(begin, end - begin);
  require(value == "0" || value == "1", "configuration gives gather the value '", value,
          "'; it must be 0 or 1");
  // One of the two commas stays, unless nothing else does.
  rest.erase(at, end - at);
  fields = rest.size() > 2 ? rest.substr(1, rest.size() - 2) : "";
  return value == "1";
}

Choice choose(const core::Problem& problem, Device& device, core::SoftmaxPolicy softmax,
              int64 promote_keys, core::DType codes, std::optional<bool> gathers) {
  const std::string_view arch = device.properties().arch;
  const auto config_of = [&](const core::Problem& p) {
    return choose_forward_fp8(p, softmax, arch, promote_keys, codes);
  };
  if (!problem.is_paged()) return {config_of(problem), {}};
  if (!core::has_quantized_pages(problem)) {
    return {config_of(gathered(problem)),
            {.text = "gathered in front of every run",
             .why = "values lie in rows, not as a QuantizePlan writes pages"}};
  }
  if (arch != "sm_90a") {
    return {config_of(gathered(problem)),
            gathering_pages(device, "the kernel reads none where they lie")};
  }
  const ForwardConfig in_place = config_of(problem);
  Gathering choice = gathering_of(problem, std::get<core::FwdConfig>(in_place));
  if (gathers) choice = {*gathers, "as the configuration asks"};
  if (choice.gathers) return {config_of(gathered(problem)), gathering_pages(device, choice.why)};
  return {in_place,
          {.text = "read in place", .why = std::move(choice.why), .are_sequences = false}};
}

}  // namespace

std::shared_ptr<const GpuProgram> prepare(const core::Problem& problem, Device& device,
                                          const Options& options) {
  static auto* const kernels = new SharedPrograms<ForwardFp8Kernel>;
  const EightBits bits = options.eight_bits.value_or(EightBits{});
  const core::QuantizeOptions quantization = quantize_options(bits.quantization);
  // One accumulator may have all keys where there are no more.
  const int64 promote_keys = bits.promote_keys >= problem.seqlen_k ? 0 : bits.promote_keys;
  std::string fields = options.configuration;
  const bool may_gather =
      core::has_quantized_pages(problem) && device.properties().arch == "sm_90a";
  const std::optional<bool> gathers = may_gather ? take_gather(fields) : std::nullopt;
  Choice chosen = choose(problem, device, softmax_policy(options.softmax), promote_keys,
                         core::code_type(problem.q.dtype, quantization), gathers);
  ForwardConfig& config = chosen.config;
  override_forward(config, fields);
  if (auto* hopper = std::get_if<core::FwdConfig>(&config); hopper && hopper->page_keys > 0) {
    hopper->page_keys = core::fp8_page_keys(problem.page_size, hopper->tile_k);
  }
  const bool by_hand = !fields.empty();
  auto kernel = kernels->get(device, forward_fp8_text(config), [&] {
    return by_hand ? std::make_shared<const ForwardFp8Kernel>(device, config)
                   : fitting_kernel(device, config);
  });
  return std::make_shared<const Fp8Program>(std::move(kernel), problem, device, quantization,
                                            std::move(chosen.pages));
}

}  // namespace fovea::runtime::fp8_program

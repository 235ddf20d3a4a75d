#include "tools/problem_options.h"

#include <fmt/format.h>

#include <array>
#include <functional>
#include <utility>

#include "tools/text.h"

namespace fovea::tools {
namespace {

constexpr std::int64_t max_extent = 2147483647;  // lengths are 32-bit integers
constexpr std::int64_t max_threads = 1024;
constexpr std::int64_t max_splits = 1 << 20;
constexpr std::size_t value_limit = 40;

template <typename Value, std::size_t count>
using Names = std::array<std::pair<std::string_view, Value>, count>;

constexpr Names<DType, 6> dtype_names = {{{"f32", DType::f32},
                                          {"bf16", DType::bf16},
                                          {"f16", DType::f16},
                                          {"e4m3", DType::e4m3},
                                          {"e5m2", DType::e5m2},
                                          {"s8", DType::s8}}};
constexpr Names<Layout, 2> layout_names = {{{"bshd", Layout::bshd}, {"bhsd", Layout::bhsd}}};
constexpr Names<Device, 6> device_names = {{{"auto", Device::automatic},
                                            {"cpu", Device::cpu},
                                            {"cuda", Device::cuda},
                                            {"emulated:sm_90a", Device::emulated_sm90a},
                                            {"emulated:sm_100a", Device::emulated_sm100a},
                                            {"emulated:sm_103a", Device::emulated_sm103a}}};
constexpr Names<Softmax, 4> softmax_names = {{{"auto", Softmax::automatic},
                                              {"online", Softmax::online},
                                              {"conditional", Softmax::conditional},
                                              {"sum_guard", Softmax::sum_guard}}};

constexpr Names<Fp8Scales, 3> scales_names = {
    {{"tensor", Fp8Scales::tensor}, {"head", Fp8Scales::head}, {"block", Fp8Scales::block}}};

template <typename Value, std::size_t count>
Value parse_name(std::string_view what, std::string_view text, const Names<Value, count>& names) {
  std::string known;
  for (std::size_t i = 0; i < count; ++i) {
    if (names[i].first == text) return names[i].second;
    known += fmt::format("{}{}", i == 0 ? "" : (i + 1 == count ? " or " : ", "), names[i].first);
  }
  throw Error(fmt::format("{} is '{}'; {} is needed", what, printable(text, value_limit), known));
}

void read_window(std::string_view text, ProblemOptions& options) {
  const auto parts = split(text, ',');
  if (parts.size() != 2) {
    throw Error(
        fmt::format("--window is '{}'; two integers LEFT,RIGHT are needed, -1 for an "
                    "unbounded side",
                    printable(text, value_limit)));
  }
  // Which negative values mean something is for the library to say.
  options.window_left = parse_integer("--window", parts[0], -max_extent, max_extent);
  options.window_right = parse_integer("--window", parts[1], -max_extent, max_extent);
}

}  // namespace

CLI::Option* add_text_option(CLI::App& app, const std::string& name,
                             const std::function<void(const std::string&)>& read,
                             const std::string& help) {
  return app.add_option_function<std::string>(name, read, help);
}

void add_shape_option(CLI::App& app, Shape& shape) {
  add_text_option(
      app, "--shape", [&shape](const std::string& text) { shape = parse_shape(text); },
      "b,hq,hkv,sq,sk,d[,dv]: batch, heads of q and of k and v, lengths, head dimensions")
      ->type_name("SHAPE")
      ->required();
}

DType parse_dtype(std::string_view what, std::string_view text) {
  return parse_name(what, text, dtype_names);
}

Shape parse_shape(std::string_view text) {
  const auto parts = split(text, ',');
  if (parts.size() != 6 && parts.size() != 7) {
    throw Error(fmt::format("--shape is '{}'; b,hq,hkv,sq,sk,d or b,hq,hkv,sq,sk,d,dv is needed",
                            printable(text, value_limit)));
  }
  std::array<std::int64_t, 7> extents{};
  for (std::size_t i = 0; i < parts.size(); ++i) {
    extents[i] = parse_integer("an entry of --shape", parts[i], 0, max_extent);
  }
  if (parts.size() == 6) extents[6] = extents[5];
  return {extents[0], extents[1], extents[2], extents[3], extents[4], extents[5], extents[6]};
}

std::vector<std::int64_t> parse_extents(std::string_view what, std::string_view text) {
  std::vector<std::int64_t> values;
  for (const std::string_view part : split(text, ',')) {
    values.push_back(parse_integer(what, part, 1, max_extent));
  }
  return values;
}

void add_common_options(CLI::App& app, ProblemOptions& options) {
  add_text_option(
      app, "--device",
      [&options](const std::string& text) {
        options.run.device = parse_name("--device", text, device_names);
      },
      "auto, cpu, cuda, emulated:sm_90a or emulated:sm_100a")
      ->type_name("DEVICE");
  add_text_option(
      app, "--threads",
      [&options](const std::string& text) {
        options.run.threads = static_cast<int>(parse_integer("--threads", text, 1, max_threads));
      },
      "CPU threads; by default all")
      ->type_name("N");
  app.add_option("--json", options.json,
                 "Write the results as JSON to FILE, or - for standard output")
      ->type_name("FILE");
  app.add_flag("--quiet", options.quiet, "Print no results and no progress bar")
      ->disable_flag_override();
}

namespace {

// Asks for attention in 8 bits, and gives what was asked for.
EightBits& in_eight_bits(ProblemOptions& options) {
  if (!options.run.eight_bits) options.run.eight_bits.emplace();
  return *options.run.eight_bits;
}

void add_eight_bits(CLI::App& app, ProblemOptions& o) {
  const auto text = [&app](const char* flag, const char* type, const char* help,
                           const std::function<void(const std::string&)>& read) {
    add_text_option(app, flag, read, help)->type_name(type)->group("Eight bits");
  };
  text("--quantize", "SCALES",
       "Quantise q, k and v to 8 bits first, with scales for each tensor, head or block of 32 rows",
       [&o](const std::string& t) {
         in_eight_bits(o).quantization.scales = parse_name("--quantize", t, scales_names);
       });
  text("--quantize-dtype", "TYPE",
       "What to quantise to: e4m3 (the default), e5m2, or s8 (q and k; v is e4m3)",
       [&o](const std::string& t) {
         in_eight_bits(o).quantization.dtype = parse_dtype("--quantize-dtype", t);
       });
  app.add_flag_callback(
         "--no-rotation", [&o] { in_eight_bits(o).quantization.rotate = false; },
         "Quantise q and k as they are, without signs and Hadamard transform")
      ->group("Eight bits");
  text("--promote", "KEYS",
       "GPUs: keys that a tensor-core accumulator sums before it is added in fp32; 0: all",
       [&o](const std::string& t) {
         in_eight_bits(o).promote_keys = parse_integer("--promote", t, 0, max_extent);
       });
}

// "64" or "64,500000"
void read_rotary(const std::string& text, ProblemOptions& options) {
  const std::size_t comma = text.find(',');
  const std::int64_t columns = parse_integer("--rotary", text.substr(0, comma), 2, max_extent);
  if (columns % 2 != 0) {
    throw Error(fmt::format("--rotary is {}; columns are turned in pairs, so give an even number",
                            columns));
  }
  in_eight_bits(options);
  options.rotary_columns = columns;
  if (comma == std::string::npos) return;
  options.rotary_base = parse_real("--rotary", text.substr(comma + 1));
  if (!(options.rotary_base > 0.0f)) {
    throw Error(fmt::format("--rotary has the base {}; it must be positive", options.rotary_base));
  }
}

}  // namespace

void add_rotary_options(CLI::App& app, ProblemOptions& options) {
  CLI::Option* const rotary = add_text_option(
      app, "--rotary", [&options](const std::string& text) { read_rotary(text, options); },
      "Turn the first N columns of q and k by a rotary embedding of base B (10000) before they are "
      "quantised");
  rotary->type_name("N[,B]")->group("Eight bits");
  app.add_flag("--rotary-interleaved", options.rotary_interleaved,
               "Its pairs are neighbours, (0, 1), (2, 3), ...; else (0, N / 2), ...")
      ->disable_flag_override()
      ->needs(rotary)
      ->group("Eight bits");
}

void add_quantized_pages_option(CLI::App& app, ProblemOptions& options) {
  add_text_option(
      app, "--quantized-pages",
      [&options](const std::string& text) {
        in_eight_bits(options);
        options.quantized_page_size = parse_integer("--quantized-pages", text, 1, max_extent);
      },
      "Quantise beforehand, keys and values into pages of N keys, a multiple of 32, in random "
      "order")
      ->type_name("N")
      ->group("Eight bits");
}

void add_problem_options(CLI::App& app, ProblemOptions& options) {
  const auto text = [&app](const char* flag, const char* type, const char* help,
                           const std::function<void(const std::string&)>& read) {
    add_text_option(app, flag, read, help)->type_name(type)->group("Problem");
  };
  const auto flag = [&app](const char* name, bool& value, const char* help) {
    app.add_flag(name, value, help)->disable_flag_override()->group("Problem");
  };
  ProblemOptions& o = options;
  text("--dtype", "TYPE", "Precision of q, k and v: f32, bf16, f16, e4m3, e5m2 or s8 (v is e4m3)",
       [&o](const std::string& t) { o.dtype = parse_dtype("--dtype", t); });
  text("--layout", "LAYOUT", "Memory order: bshd (batch, seqlen, heads, dim) or bhsd",
       [&o](const std::string& t) { o.layout = parse_name("--layout", t, layout_names); });
  flag("--causal", o.causal, "Hide later keys (aligned to the bottom right)");
  text("--window", "L,R", "Keys to the left and right that a query sees; -1 is unbounded",
       [&o](const std::string& t) { read_window(t, o); });
  text("--softcap", "C", "score = C * tanh(score / C)",
       [&o](const std::string& t) { o.softcap = parse_real("--softcap", t); });
  text("--scale", "S", "Softmax scale; by default 1 / sqrt(head_dim)",
       [&o](const std::string& t) { o.scale = parse_real("--scale", t); });
  flag("--alibi", o.alibi, "ALiBi: lower a score by slope * distance");
  flag("--sink", o.sink, "One extra logit per head");
  flag("--deterministic", o.deterministic, "Bitwise equal results from run to run");
  text("--dropout", "P", "Probability of dropping a weight",
       [&o](const std::string& t) { o.dropout.probability = parse_real("--dropout", t); });
  text("--dropout-seed", "N", "Seed of the dropout mask",
       [&o](const std::string& t) { o.dropout.seed = parse_unsigned("--dropout-seed", t); });
  text("--splits", "N", "Parts to split the keys into; 0 leaves it to the plan",
       [&o](const std::string& t) {
         o.splits = static_cast<std::int32_t>(parse_integer("--splits", t, 0, max_splits));
       });
  add_eight_bits(app, o);
  text("--softmax", "HOW", "Running reference of a row: auto, online, conditional or sum_guard",
       [&o](const std::string& t) { o.run.softmax = parse_name("--softmax", t, softmax_names); });
  add_common_options(app, options);
}

std::string shape_string(const Shape& s) {
  std::string text = fmt::format("{},{},{},{},{},{}", s.batch, s.heads_q, s.heads_kv, s.seqlen_q,
                                 s.seqlen_k, s.head_dim);
  if (s.head_dim_v != s.head_dim) text += fmt::format(",{}", s.head_dim_v);
  return text;
}

void apply_options(const ProblemOptions& options, Problem& problem) {
  problem.softmax_scale = options.scale;
  problem.causal = options.causal;
  problem.window_left = options.window_left;
  problem.window_right = options.window_right;
  problem.softcap = options.softcap;
  problem.dropout = options.dropout;
  problem.num_splits = options.splits;
  problem.deterministic = options.deterministic;
}

std::string describe(const ProblemOptions& options) {
  std::string text(options.dtype ? name(*options.dtype) : std::string_view());
  if (options.layout == Layout::bhsd) text += " bhsd";
  if (options.causal) text += " causal";
  if (options.window_left != -1 || options.window_right != -1) {
    text += fmt::format(" window {},{}", options.window_left, options.window_right);
  }
  if (options.softcap != 0.0f) text += fmt::format(" softcap {}", options.softcap);
  if (options.scale) text += fmt::format(" scale {}", *options.scale);
  if (options.alibi) text += " alibi";
  if (options.sink) text += " sink";
  if (options.deterministic) text += " deterministic";
  if (options.dropout.probability != 0.0f) {
    text += fmt::format(" dropout {} (seed {})", options.dropout.probability, options.dropout.seed);
  }
  if (options.splits != 0) text += fmt::format(" splits {}", options.splits);
  if (options.run.eight_bits) {
    const EightBits& bits = *options.run.eight_bits;
    text += fmt::format(" in {} (scales per {}{}, promoted every {} keys)",
                        name(bits.quantization.dtype),
                        scales_names[static_cast<std::size_t>(bits.quantization.scales)].first,
                        bits.quantization.rotate ? ", rotated" : "", bits.promote_keys);
    if (options.rotary_columns > 0) {
      text += fmt::format(" rotary {},{}{}", options.rotary_columns, options.rotary_base,
                          options.rotary_interleaved ? " interleaved" : "");
    }
    if (options.quantized_page_size > 0) {
      text += fmt::format(" in pages of {}", options.quantized_page_size);
    }
  }
  if (options.run.softmax != Softmax::automatic) {
    text += fmt::format(" softmax {}", name(options.run.softmax));
  }
  return text.substr(text.starts_with(' ') ? 1 : 0);
}

}  // namespace fovea::tools

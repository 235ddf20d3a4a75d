// The options that describe an attention problem and where it runs, shared by all commands.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>

#include "fovea/fovea.hpp"

namespace fovea::tools {

enum class Layout : std::uint8_t { bshd, bhsd };

struct ProblemOptions {
  std::optional<DType> dtype;  // absent: that of the input, or f32 for random data
  Layout layout = Layout::bshd;
  bool causal = false;
  std::int64_t window_left = -1;
  std::int64_t window_right = -1;
  float softcap = 0.0f;
  std::optional<float> scale;
  bool alibi = false;
  bool sink = false;
  bool deterministic = false;
  Dropout dropout;
  std::int32_t splits = 0;

  // Of quantised runs: columns of q and k that are turned, 0 for none (rotary.h).
  std::int64_t rotary_columns = 0;
  float rotary_base = 10000.0f;
  bool rotary_interleaved = false;
  std::int64_t quantized_page_size = 0;  // keys of a page (quantized_pages.h); 0: none

  Options run;  // device, threads, softmax

  std::string json;  // file, "-" for standard output, empty for none
  bool quiet = false;
};

// Extents of a problem with random or no data, as --shape gives them.
struct Shape {
  std::int64_t batch = 0;
  std::int64_t heads_q = 0;
  std::int64_t heads_kv = 0;
  std::int64_t seqlen_q = 0;
  std::int64_t seqlen_k = 0;
  std::int64_t head_dim = 0;
  std::int64_t head_dim_v = 0;
};

// Adds [problem] and the common options to a command. A value that cannot be read is an Error while
// the command line is parsed. `options` must outlive the app.
void add_problem_options(CLI::App& app, ProblemOptions& options);

// Adds --shape, without which the command does not run.
void add_shape_option(CLI::App& app, Shape& shape);

// Adds --rotary and --rotary-interleaved, for commands whose data are random.
void add_rotary_options(CLI::App& app, ProblemOptions& options);

// Adds --quantized-pages.
void add_quantized_pages_option(CLI::App& app, ProblemOptions& options);

// Adds --device, --threads, --json and --quiet alone.
void add_common_options(CLI::App& app, ProblemOptions& options);

// Adds an option whose text `read` takes; faults are Errors.
CLI::Option* add_text_option(CLI::App& app, const std::string& name,
                             const std::function<void(const std::string&)>& read,
                             const std::string& help);

[[nodiscard]] DType parse_dtype(std::string_view what, std::string_view text);
// "b,hq,hkv,sq,sk,d" or "b,hq,hkv,sq,sk,d,dv".
[[nodiscard]] Shape parse_shape(std::string_view text);
// The same as text.
[[nodiscard]] std::string shape_string(const Shape& shape);
// "64,128,256": positive integers.
[[nodiscard]] std::vector<std::int64_t> parse_extents(std::string_view what, std::string_view text);

// Sets everything of the problem that is not a tensor.
void apply_options(const ProblemOptions& options, Problem& problem);

// The options that were given, for titles and for JSON: "bf16 causal window 300,0".
[[nodiscard]] std::string describe(const ProblemOptions& options);

}  // namespace fovea::tools

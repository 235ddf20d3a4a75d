// fovea accuracy: what 16 and 8 bits, and each ingredient of the 8-bit method, cost against fp64.
//
// Random input is that of FlashAttention-3's table (section 4.3): N(0, 1), and on one element in
// 1000 N(0, 100) more. The reference sees the inputs unrounded; methods see them rounded to fp16.
#include <fmt/format.h>

#include <cmath>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "fovea/fp8.hpp"
#include "tools/accuracy.h"
#include "tools/console.h"
#include "tools/convert.h"
#include "tools/json_output.h"
#include "tools/program.h"
#include "tools/tensor_files.h"
#include "tools/text.h"
#include "tools/tick_picture.h"
#include "tools/workload.h"

namespace fovea::tools {
namespace {

constexpr std::int64_t max_keys = std::int64_t{1} << 20;
constexpr std::int64_t promoted_keys = 768;

std::int64_t elements(const Tensor& t) { return t.shape[0] * t.shape[1] * t.shape[2] * t.shape[3]; }

// q, k and v in fp32, and the same rounded to fp16 with memory for a result.
struct Sample {
  Workload exact;
  Workload rounded;
};

Tensor rounded_copy(const Tensor& from, Workload& to) {
  Tensor copy = from;
  copy.dtype = DType::f16;
  std::byte* const data = to.allocate(elements(from), DType::f16);
  convert(static_cast<const std::byte*>(from.data), DType::f32, data, DType::f16, elements(from));
  copy.data = data;
  return copy;
}

void round_inputs(Sample& sample) {
  Problem& p = sample.rounded.problem;
  p = sample.exact.problem;
  p.q = rounded_copy(sample.exact.problem.q, sample.rounded);
  p.k = rounded_copy(sample.exact.problem.k, sample.rounded);
  p.v = rounded_copy(sample.exact.problem.v, sample.rounded);
  const Tensor& out = sample.exact.problem.out;
  p.out.data = sample.rounded.allocate(elements(out), DType::f32);
  p.out.dtype = DType::f32;
}

// A 16-bit mantissa of randomness decides which elements are outliers.
void add_outliers(const Tensor& tensor, std::uint64_t seed) {
  const std::int64_t count = elements(tensor);
  std::vector<float> chance(static_cast<std::size_t>(count));
  std::vector<float> size(static_cast<std::size_t>(count));
  fill_normal(reinterpret_cast<std::byte*>(chance.data()), DType::f32, count, seed * 2 + 1);
  fill_normal(reinterpret_cast<std::byte*>(size.data()), DType::f32, count, seed * 2 + 2);
  auto* const x = static_cast<float*>(tensor.data);
  constexpr float one_in_1000 = 3.0902323f;  // P(N(0, 1) > this) = 0.001
  for (std::int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<std::size_t>(i);
    if (chance[at] > one_in_1000) x[i] += 10.0f * size[at];
  }
}

struct Method {
  const char* name;
  std::function<std::vector<double>(const Sample&, const ProblemOptions&)> run;
};

std::vector<double> naive(const Sample& sample, const ProblemOptions& options) {
  return reference(sample.rounded.problem, Precision::same, options.run.threads).out;
}

std::vector<double> fused(const Sample& sample, const ProblemOptions& options) {
  Options run = options.run;
  run.device = Device::cpu;
  attention(sample.rounded.problem, run);
  return values_of(sample.rounded.problem.out);
}

Method eight_bits(const char* name, const Fp8Arithmetic& arithmetic) {
  return {name, [arithmetic](const Sample& sample, const ProblemOptions& options) {
            return reference_fp8(sample.rounded.problem, arithmetic, options.run.threads).out;
          }};
}

// The table: 16 bits, 8 bits as everybody does them, the full method, and it with one ingredient
// changed at a time.
std::vector<Method> table_methods() {
  Fp8Arithmetic full;
  full.promote_keys = promoted_keys;
  Fp8Arithmetic plain = full;
  plain.quantization = {.scales = Fp8Scales::tensor, .rotate = false};
  Fp8Arithmetic unfused = plain;
  unfused.unfused = true;
  unfused.accumulator_bits = 23;
  Fp8Arithmetic integers = full;
  integers.quantization.dtype = DType::s8;
  Fp8Arithmetic integers_one_scale = integers;
  integers_one_scale.quantization.scales = Fp8Scales::tensor;
  Fp8Arithmetic integers_unrotated = integers;
  integers_unrotated.quantization.rotate = false;
  Fp8Arithmetic one_scale = full;
  one_scale.quantization.scales = Fp8Scales::tensor;
  Fp8Arithmetic unrotated = full;
  unrotated.quantization.rotate = false;
  Fp8Arithmetic one_level = full;
  one_level.promote_keys = 0;
  Fp8Arithmetic wide = full;
  wide.accumulator_bits = 23;
  Fp8Arithmetic online = full;
  online.softmax = Softmax::online;
  Fp8Arithmetic rounded_sum = full;
  rounded_sum.sum_rounded_weights = true;
  Fp8Arithmetic exact_weights = full;
  exact_weights.round_weights = false;
  return {
      {"fp16, unfused", naive},
      {"fp16, fused", fused},
      eight_bits("fp8, one scale a tensor, unfused", unfused),
      eight_bits("fp8, one scale a tensor", plain),
      eight_bits("fp8, the full method", full),
      eight_bits("  one scale a tensor", one_scale),
      eight_bits("  not rotated", unrotated),
      eight_bits("  one level of accumulation", one_level),
      eight_bits("  accumulated in fp32", wide),
      eight_bits("  online maximum, top 2^8", online),
      eight_bits("  sums of rounded weights", rounded_sum),
      eight_bits("  weights not rounded", exact_weights),
      eight_bits("q and k in s8, the full method", integers),
      eight_bits("  one scale a tensor", integers_one_scale),
      eight_bits("  not rotated", integers_unrotated),
  };
}

// For the growth of errors with the number of keys.
std::vector<Method> growth_methods() {
  Fp8Arithmetic two_levels;
  two_levels.promote_keys = promoted_keys;
  Fp8Arithmetic rarely = two_levels;
  rarely.promote_keys = 1024;
  rarely.tile_k = 128;  // as kernels that promote have; 192 does not divide it
  Fp8Arithmetic wide;
  wide.accumulator_bits = 23;
  Fp8Arithmetic online = two_levels;
  online.softmax = Softmax::online;
  return {eight_bits("one level of accumulation", {}), eight_bits("two levels", two_levels),
          eight_bits("two levels, 1024 keys", rarely),
          eight_bits("two levels, online maximum", online),
          eight_bits("accumulated in fp32", wide)};
}

struct Error2 {
  double squares = 0.0;
  double truth = 0.0;
  std::int64_t count = 0;

  void add(const std::vector<double>& values, const std::vector<double>& exact) {
    for (std::size_t i = 0; i < exact.size(); ++i) {
      squares += (values[i] - exact[i]) * (values[i] - exact[i]);
      truth += exact[i] * exact[i];
    }
    count += static_cast<std::int64_t>(exact.size());
  }
  [[nodiscard]] double rms() const {
    return std::sqrt(squares / static_cast<double>(std::max<std::int64_t>(count, 1)));
  }
  [[nodiscard]] double relative() const { return std::sqrt(squares / truth); }
};

// One column of a table: what the input was, and the errors of all methods on it.
struct Column {
  std::string input;
  std::vector<Error2> errors;
};

class AccuracyCommand : public Command {
 public:
  explicit AccuracyCommand(CLI::App* app) : Command(app) {
    app->add_option("--input", inputs_,
                    ".safetensors files with fp32 tensors q, k and v, instead of random input")
        ->type_name("FILE");
    add_text_option(
        *app, "--keys", [this](const std::string& text) { keys_ = parse_extents("--keys", text); },
        "Numbers of keys; by default 4096,8192, with --growth 1024,8192,32768,131072")
        ->type_name("N,..");
    const auto number = [&](const char* flag, std::int64_t& value, std::int64_t most,
                            const char* help) {
      add_text_option(
          *app, flag,
          [flag, &value, most](const std::string& text) {
            value = parse_integer(flag, text, 1, most);
          },
          help)
          ->type_name("N");
    };
    number("--queries", queries_, 1 << 16, "Query rows of a draw; by default 128");
    number("--head-dim", head_dim_, 256, "Head dimension of random input; by default 128");
    number("--seeds", seeds_, 1000, "Draws to average over; by default 4");
    app->add_flag("--growth", growth_,
                  "Errors against the number of keys: input without outliers, values around 1")
        ->disable_flag_override();
    app->add_option(
           "--picture", picture_,
           "Write an SVG of the ticks of e4m3 under 32 rows of k, before and after rotation")
        ->type_name("FILE");
    add_common_options(*app, options_);
  }

  int execute() override {
    JsonOutput json(options_.json);
    if (keys_.empty()) {
      keys_ = growth_ ? std::vector<std::int64_t>{1024, 8192, 32768, 131072}
                      : std::vector<std::int64_t>{4096, 8192};
    }
    for (const std::int64_t keys : keys_) {
      if (keys > max_keys)
        throw Error(fmt::format("--keys has {}, at most {} fit", keys, max_keys));
    }
    const std::vector<Method> methods = growth_ ? growth_methods() : table_methods();
    const std::size_t columns = inputs_.empty() ? keys_.size() : inputs_.size();
    const std::int64_t draws = inputs_.empty() ? seeds_ : 1;
    Progress progress(static_cast<std::int64_t>(columns * (methods.size() + 1)) * draws,
                      options_.quiet);
    std::vector<Column> table;
    for (std::size_t c = 0; c < columns; ++c) {
      Column column{title(c), std::vector<Error2>(methods.size())};
      for (std::int64_t draw = 0; draw < draws; ++draw) {
        measure(make_sample(c, static_cast<std::uint64_t>(draw)), methods, column, progress);
      }
      table.push_back(std::move(column));
    }
    if (!picture_.empty()) write_picture();
    progress.clear();
    if (!options_.quiet && !json.on_standard_output()) print(methods, table);
    json.write(to_json(methods, table));
    return exit_good;
  }

 private:
  [[nodiscard]] std::string title(std::size_t column) const {
    if (inputs_.empty()) return fmt::format("{} keys", keys_[column]);
    const std::string& path = inputs_[column];
    return path.substr(path.find_last_of('/') + 1);
  }

  [[nodiscard]] Sample make_sample(std::size_t column, std::uint64_t draw) const {
    Sample sample;
    if (inputs_.empty()) {
      ProblemOptions options;
      options.dtype = DType::f32;
      sample.exact =
          make_workload({1, 1, 1, queries_, keys_[column], head_dim_, head_dim_}, options);
      fill_inputs(sample.exact, draw);
      const Problem& p = sample.exact.problem;
      if (growth_) {
        auto* const v = static_cast<float*>(p.v.data);
        for (std::int64_t i = 0; i < elements(p.v); ++i) v[i] += 1.0f;
      } else {
        std::uint64_t seed = 3 * draw;
        for (const Tensor* tensor : {&p.q, &p.k, &p.v}) add_outliers(*tensor, seed++);
      }
    } else {
      TensorFiles files;
      files.add_safetensors(inputs_[column]);
      ProblemOptions options;
      options.dtype = DType::f32;
      const Workload loaded = load_workload(files, options, DType::f32, false);
      copy_inputs(loaded.problem, sample.exact);
    }
    round_inputs(sample);
    return sample;
  }

  // The workload of a file points into it: copy what is needed.
  static void copy_inputs(const Problem& from, Workload& to) {
    to.problem = from;
    to.cu_seqlens_q.assign(from.cu_seqlens_q.begin(), from.cu_seqlens_q.end());
    to.cu_seqlens_k.assign(from.cu_seqlens_k.begin(), from.cu_seqlens_k.end());
    to.problem.cu_seqlens_q = to.cu_seqlens_q;
    to.problem.cu_seqlens_k = to.cu_seqlens_k;
    for (Tensor Problem::*tensor : {&Problem::q, &Problem::k, &Problem::v}) {
      const std::vector<double> values = values_of(from.*tensor);
      std::byte* const data = to.allocate(elements(from.*tensor), DType::f32);
      for (std::size_t i = 0; i < values.size(); ++i) {
        reinterpret_cast<float*>(data)[i] = static_cast<float>(values[i]);
      }
      to.problem.*tensor = contiguous(data, DType::f32, (from.*tensor).shape);
    }
    to.problem.out =
        contiguous(to.allocate(elements(from.out), DType::f32), DType::f32, from.out.shape);
  }

  void measure(const Sample& sample, const std::vector<Method>& methods, Column& column,
               Progress& progress) const {
    progress.step(fmt::format("{}: definition in fp64", column.input));
    const std::vector<double> exact =
        reference(sample.exact.problem, Precision::fp64, options_.run.threads).out;
    for (std::size_t m = 0; m < methods.size(); ++m) {
      progress.step(fmt::format("{}: {}", column.input, methods[m].name));
      column.errors[m].add(methods[m].run(sample, options_), exact);
    }
  }

  void write_picture() const {
    const Sample sample = make_sample(0, 0);
    const Tensor& k = sample.exact.problem.k;
    const std::vector<double> values = values_of(k);
    // The first 32 rows of the first head that hold an outlier are of interest; take the first
    // head's block with the largest element.
    const std::int64_t columns = k.shape[3];
    const std::int64_t rows = k.shape[1] / 32 * 32;
    if (columns % 32 != 0 || columns > 256 || rows == 0) {
      throw Error(
          fmt::format("--picture needs at least 32 keys and a head dimension that is a "
                      "multiple of 32 up to 256, here there are {} keys of {}",
                      k.shape[1], columns));
    }
    std::vector<float> most;
    double largest = -1.0;
    for (std::int64_t block = 0; block < rows; block += 32) {
      std::vector<float> x;
      double top = 0.0;
      for (std::int64_t row = block; row < block + 32; ++row) {
        for (std::int64_t c = 0; c < columns; ++c) {
          const double value = values[static_cast<std::size_t>(row * k.shape[2] * columns + c)];
          x.push_back(static_cast<float>(value));
          top = std::max(top, std::abs(value));
        }
      }
      if (top > largest) {
        largest = top;
        most = std::move(x);
      }
    }
    OutputFile file(picture_);
    const std::string svg = tick_picture(most, columns, 0);
    file.write({std::as_bytes(std::span(svg))});
    file.commit();
  }

  void print(const std::vector<Method>& methods, const std::vector<Column>& columns) const {
    std::vector<std::string> header{"rms error, relative to rms out"};
    for (const Column& column : columns) header.push_back(column.input);
    Table table(std::move(header));
    for (std::size_t m = 0; m < methods.size(); ++m) {
      std::vector<std::string> row{methods[m].name};
      for (const Column& column : columns) {
        row.push_back(
            fmt::format("{:.2e} {:.1e}", column.errors[m].rms(), column.errors[m].relative()));
      }
      table.add(std::move(row));
    }
    fmt::print("{}", table.text());
  }

  [[nodiscard]] Json to_json(const std::vector<Method>& methods,
                             const std::vector<Column>& columns) const {
    Json document{{"command", "accuracy"}, {"growth", growth_}, {"queries", queries_},
                  {"head_dim", head_dim_}, {"seeds", seeds_},   {"results", Json::array()}};
    for (const Column& column : columns) {
      for (std::size_t m = 0; m < methods.size(); ++m) {
        document["results"].push_back({{"input", column.input},
                                       {"method", methods[m].name},
                                       {"rms", column.errors[m].rms()},
                                       {"relative", column.errors[m].relative()}});
      }
    }
    return document;
  }

  ProblemOptions options_;
  std::vector<std::string> inputs_;
  std::vector<std::int64_t> keys_;
  std::int64_t queries_ = 128;
  std::int64_t head_dim_ = 128;
  std::int64_t seeds_ = 4;
  bool growth_ = false;
  std::string picture_;
};

}  // namespace

std::unique_ptr<Command> add_accuracy(CLI::App& program) {
  return std::make_unique<AccuracyCommand>(program.add_subcommand(
      "accuracy", "Compare 16-bit and 8-bit attention with the definition in fp64"));
}

}  // namespace fovea::tools

// fovea emulate: an unmodified CUDA program on the PTX emulator.
//
// The program is started with the emulator's libcudart and libcuda in front of all others. What its
// kernels do wrong goes to standard error while it runs; each launch leaves a line of JSON in a
// file, of which the table and the JSON document are made when it has ended.
#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <utility>

#include "tools/json_output.h"
#include "tools/program.h"
#include "tools/text.h"

extern char** environ;

namespace fovea::tools {
namespace {

// Beside the program in a build, in the library folder where it is installed.
constexpr const char* library_folders[] = {"lib/fovea-emulate", "../lib/fovea-emulate",
                                           "../lib64/fovea-emulate"};

std::string library_folder() {
  std::error_code fault;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", fault);
  for (const char* folder : library_folders) {
    const std::filesystem::path candidate = program.parent_path() / folder;
    if (std::filesystem::exists(candidate / "libcuda.so.1", fault)) {
      return candidate.lexically_normal().string();
    }
  }
  throw Error(
      "the emulated CUDA libraries are not installed beside this program; name their "
      "folder with --libraries");
}

class TemporaryFile {
 public:
  TemporaryFile() {
    const char* folder = std::getenv("TMPDIR");
    path_ = std::string(folder == nullptr ? "/tmp" : folder) + "/fovea-emulate-XXXXXX";
    const int file = mkstemp(path_.data());
    if (file < 0) throw Error(fmt::format("cannot make a file like '{}'", path_));
    close(file);
  }
  ~TemporaryFile() { unlink(path_.c_str()); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::vector<char*> pointers(std::vector<std::string>& words) {
  std::vector<char*> result;
  for (std::string& word : words) result.push_back(word.data());
  result.push_back(nullptr);
  return result;
}

// The exit status, 128 + n after signal n.
int run(std::vector<std::string> command, const std::string& settings, const std::string& folder) {
  std::vector<std::string> environment;
  std::string search = folder;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    constexpr std::string_view paths = "LD_LIBRARY_PATH=";
    if (text.starts_with("FOVEA_EMULATE=")) continue;
    if (text.starts_with(paths)) {
      if (text.size() > paths.size()) search += ":" + std::string(text.substr(paths.size()));
      continue;
    }
    environment.emplace_back(text);
  }
  environment.push_back("LD_LIBRARY_PATH=" + search);
  environment.push_back("FOVEA_EMULATE=" + settings);
  pid_t child = 0;
  const int fault = posix_spawnp(&child, command[0].c_str(), nullptr, nullptr,
                                 pointers(command).data(), pointers(environment).data());
  if (fault != 0) {
    throw Error(
        fmt::format("cannot start '{}': {}", printable(command[0], 100), std::strerror(fault)));
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// Sums of all launches of one kernel.
struct KernelSum {
  std::string kernel, name;
  std::uint64_t launches = 0, ctas = 0, findings = 0;
  double seconds = 0;
  Json total = Json::object();
};

struct Outcome {
  bool loaded = false;  // the program did load the emulated libraries
  std::vector<KernelSum> kernels;
  Json launches = Json::array();
  std::uint64_t findings = 0;
};

void add_launch(Outcome& outcome, Json launch) {
  const Json& report = launch.at("report");
  const std::string kernel = report.at("kernel");
  auto sum = std::find_if(outcome.kernels.begin(), outcome.kernels.end(),
                          [&](const KernelSum& k) { return k.kernel == kernel; });
  if (sum == outcome.kernels.end()) {
    outcome.kernels.push_back({kernel, launch.at("name")});
    sum = std::prev(outcome.kernels.end());
  }
  const std::uint64_t findings =
      report.at("faults").size() + report.at("faults_not_listed").get<std::uint64_t>();
  ++sum->launches;
  sum->ctas += launch.at("ctas").get<std::uint64_t>();
  sum->seconds += launch.at("seconds").get<double>();
  sum->findings += findings;
  outcome.findings += findings;
  for (const auto& [counter, value] : report.at("total").items()) {
    sum->total[counter] = sum->total.value(counter, std::uint64_t{0}) + value.get<std::uint64_t>();
  }
  outcome.launches.push_back(std::move(launch));
}

Outcome read_report(const std::string& path) {
  Outcome outcome;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    Json entry = Json::parse(line, nullptr, false);
    if (entry.is_discarded()) continue;  // the program was ended while it wrote
    outcome.loaded = true;
    if (entry.contains("report")) add_launch(outcome, std::move(entry));
  }
  return outcome;
}

std::string table_of(const Outcome& outcome) {
  std::string text = fmt::format("{:<34} {:>8} {:>8} {:>9} {:>9}\n", "kernel", "launches", "CTAs",
                                 "findings", "time");
  for (const KernelSum& sum : outcome.kernels) {
    text += fmt::format("{:<34} {:>8} {:>8} {:>9} {:>9}\n", printable(sum.name, 34), sum.launches,
                        sum.ctas, sum.findings, duration_text(sum.seconds));
    for (const auto& [counter, value] : sum.total.items()) {
      const auto count = value.get<std::uint64_t>();
      if (count != 0) text += fmt::format("  {:<32} {:>17}\n", counter, count);
    }
  }
  return text;
}

class EmulateCommand : public Command {
 public:
  explicit EmulateCommand(CLI::App* app) : Command(app) {
    app->add_option("program", command_, "the program and its arguments, after --")
        ->required()
        ->type_name("-- PROGRAM [ARGS]");
    app->add_option("--device", device_, "emulated:sm_90a, emulated:sm_100a or emulated:sm_103a")
        ->capture_default_str();
    app->add_option("--order", order_, "when asynchronous work completes: eager, lazy or random")
        ->check(CLI::IsMember({"eager", "lazy", "random"}))
        ->capture_default_str();
    app->add_option("--seed", seed_, "of the order of warps and of asynchronous work");
    app->add_flag("--no-check", no_check_, "run without looking for faults");
    app->add_flag("--in-order-tensor", in_order_,
                  "let tcgen05 complete in issue order and without its fences and waits, as "
                  "hardware is seen to do");
    app->add_option("--ctas", ctas_, "run only the first N CTAs of every grid");
    app->add_option("--sms", sms_, "SMs of the emulated chip, for programs that fill it");
    app->add_flag("--stop", stop_, "end the program at its first launch with a finding");
    app->add_option("--libraries", libraries_, "folder of the emulated CUDA libraries");
    app->add_option("--json", json_, "write the counters and findings of every launch to a file");
    app->add_flag("--quiet", quiet_, "print no table of counters");
  }

  int execute() override {
    JsonOutput json(json_);
    const std::string folder = libraries_.empty() ? library_folder() : libraries_;
    const TemporaryFile report;
    const int status = run(command_, settings(report.path()), folder);
    const Outcome outcome = read_report(report.path());
    if (!outcome.loaded && status != 127) {
      throw Error(fmt::format(
          "'{}' ended with status {} and never used the emulated CUDA runtime: it has to be linked "
          "with nvcc -cudart shared",
          printable(command_[0], 100), status));
    }
    if (!quiet_) fmt::print(stderr, "{}", table_of(outcome));
    if (outcome.findings != 0) {
      fmt::print(stderr, "fovea emulate: findings: {}, launches: {}\n", outcome.findings,
                 outcome.launches.size());
    }
    write(json, outcome, status);
    return status != 0 ? status : outcome.findings != 0 ? exit_check_failed : exit_good;
  }

 private:
  std::string settings(const std::string& report) const {
    std::string text = fmt::format(
        "device={},order={},seed={},checks={},in_order_tensor={},stop={}", device_, order_, seed_,
        no_check_ ? "off" : "on", in_order_ ? "on" : "off", stop_ ? "on" : "off");
    if (ctas_ != 0) text += fmt::format(",ctas={}", ctas_);
    if (sms_ != 0) text += fmt::format(",sms={}", sms_);
    return text + ",report=" + report;
  }

  void write(JsonOutput& json, const Outcome& outcome, int status) const {
    Json kernels = Json::array();
    for (const KernelSum& sum : outcome.kernels) {
      kernels.push_back({{"kernel", sum.kernel},
                         {"name", sum.name},
                         {"launches", sum.launches},
                         {"ctas", sum.ctas},
                         {"seconds", sum.seconds},
                         {"findings", sum.findings},
                         {"total", sum.total}});
    }
    json.write({{"command", "emulate"},
                {"device", device_},
                {"program", command_},
                {"status", status},
                {"findings", outcome.findings},
                {"kernels", kernels},
                {"launches", outcome.launches}});
  }

  std::vector<std::string> command_;
  std::string device_ = "emulated:sm_90a", order_ = "eager", libraries_, json_;
  std::uint64_t seed_ = 0, ctas_ = 0;
  int sms_ = 0;
  bool no_check_ = false, in_order_ = false, stop_ = false, quiet_ = false;
};

}  // namespace

std::unique_ptr<Command> add_emulate(CLI::App& program) {
  return std::make_unique<EmulateCommand>(program.add_subcommand(
      "emulate",
      "Run a program of the CUDA runtime on the PTX emulator, and say what it does wrong"));
}

}  // namespace fovea::tools

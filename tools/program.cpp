#include "tools/program.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <exception>
#include <new>

#include "tools/text.h"

namespace fovea::tools {
namespace {

constexpr std::size_t message_limit = 1000;

void say_fault(std::string_view message) {
  const std::string line = "fovea: " + one_line(message.substr(0, message_limit)) + "\n";
  std::fputs(line.c_str(), stderr);
}

int run_throwing(std::span<const std::string> arguments) {
  Program program;
  const Program::Request request = program.parse(arguments);
  if (request.command == nullptr) {
    fmt::print("{}", request.text);
    return exit_good;
  }
  const int status = request.command->execute();
  if (std::fflush(stdout) != 0) throw Error("cannot write to standard output");
  return status;
}

}  // namespace

Program::Program() : app_("Exact attention as fast as the chip allows.", "fovea") {
  app_.set_version_flag("--version", std::string(version()));
  app_.require_subcommand(1);
  app_.get_formatter()->column_width(28);
  commands_.push_back(add_run(app_));
  commands_.push_back(add_check(app_));
  commands_.push_back(add_accuracy(app_));
  commands_.push_back(add_bench(app_));
  commands_.push_back(add_explain(app_));
  commands_.push_back(add_info(app_));
  commands_.push_back(add_compile(app_));
  commands_.push_back(add_trace(app_));
  commands_.push_back(add_emulate(app_));
}

Program::Request Program::parse(std::span<const std::string> arguments) {
  std::string names;
  for (std::size_t i = 0; i < commands_.size(); ++i) {
    names += (i == 0 ? "" : i + 1 == commands_.size() ? " or " : ", ") + commands_[i]->name();
  }
  if (arguments.empty()) {
    throw Error(fmt::format("a command is needed: {}; 'fovea --help' explains them", names));
  }
  try {
    // CLI11 takes a vector from its end.
    app_.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
  } catch (const CLI::CallForHelp&) {
    return {nullptr, app_.help()};
  } catch (const CLI::CallForAllHelp&) {
    return {nullptr, app_.help("", CLI::AppFormatMode::All)};
  } catch (const CLI::CallForVersion&) {
    return {nullptr, std::string(version()) + "\n"};
  } catch (const CLI::ParseError& error) {
    const bool known = !app_.get_subcommands().empty();
    if (!known && !arguments.front().starts_with('-')) {
      throw Error(fmt::format("'{}' is not a command; {} is needed",
                              printable(arguments.front(), 40), names));
    }
    throw Error(fmt::format("{}; 'fovea {}--help' says what is understood",
                            printable(error.what(), 200),
                            known ? app_.get_subcommands().front()->get_name() + " " : ""));
  }
  for (const auto& command : commands_) {
    if (command->chosen()) return {command.get(), {}};
  }
  throw Error(fmt::format("a command is needed: {}", names));
}

int run_program(std::span<const std::string> arguments) noexcept {
  try {
    return run_throwing(arguments);
  } catch (const std::bad_alloc&) {
    say_fault("not enough memory for this problem; give a smaller one");
  } catch (const std::exception& error) {
    say_fault(error.what());
  }
  return exit_wrong_input;
}

}  // namespace fovea::tools

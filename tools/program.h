// The program without main(): a command line to its parts, and those to an exit status.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fovea/fovea.hpp"

namespace fovea::tools {

// Exit status, as scripts see it.
inline constexpr int exit_good = 0;
inline constexpr int exit_check_failed = 1;
inline constexpr int exit_wrong_input = 2;

// A command of the program: its options, bound when it is made, and what it does with them.
class Command {
 public:
  explicit Command(CLI::App* app) : app_(app) {}
  virtual ~Command() = default;
  Command(const Command&) = delete;
  Command& operator=(const Command&) = delete;

  // Returns exit_good or exit_check_failed, or what the program that it started returned; throws
  // Error when the input is wrong.
  virtual int execute() = 0;

  [[nodiscard]] bool chosen() const { return app_->parsed(); }
  [[nodiscard]] std::string name() const { return app_->get_name(); }

 private:
  CLI::App* app_;
};

// Each adds its command to the program.
[[nodiscard]] std::unique_ptr<Command> add_run(CLI::App& program);
[[nodiscard]] std::unique_ptr<Command> add_check(CLI::App& program);
[[nodiscard]] std::unique_ptr<Command> add_accuracy(CLI::App& program);
[[nodiscard]] std::unique_ptr<Command> add_bench(CLI::App& program);
[[nodiscard]] std::unique_ptr<Command> add_explain(CLI::App& program);
[[nodiscard]] std::unique_ptr<Command> add_info(CLI::App& program);
[[nodiscard]] std::unique_ptr<Command> add_compile(CLI::App& program);
[[nodiscard]] std::unique_ptr<Command> add_trace(CLI::App& program);
[[nodiscard]] std::unique_ptr<Command> add_emulate(CLI::App& program);

class Program {
 public:
  Program();

  // What parse() found: a command to execute, or text that was asked for (--help, --version).
  struct Request {
    Command* command = nullptr;
    std::string text;
  };

  // `arguments` are those behind the program's name. Throws Error when they make no sense.
  [[nodiscard]] Request parse(std::span<const std::string> arguments);

 private:
  CLI::App app_;
  std::vector<std::unique_ptr<Command>> commands_;
};

// Parses, executes, and turns every fault into one line on standard error. Throws nothing.
[[nodiscard]] int run_program(std::span<const std::string> arguments) noexcept;

}  // namespace fovea::tools

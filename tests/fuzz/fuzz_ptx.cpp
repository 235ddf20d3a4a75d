#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "emulator/emulator.h"
#include "tests/fuzz/fuzz_targets.h"

namespace fovea::test {

namespace {

// What a broken kernel may do before it is stopped: enough to reach each of its instructions.
emulator::Schedule short_schedule() {
  emulator::Schedule schedule;
  schedule.step_limit = 2000;
  schedule.policy = emulator::Policy::random;
  schedule.seed = 1;
  return schedule;
}

// Two warps, and an address of memory wherever a parameter may be one.
void launch(emulator::Machine& machine, const emulator::Module& module, const std::string& name) {
  constexpr std::size_t memory_bytes = 65536;
  try {
    const std::uint64_t memory = machine.allocate(memory_bytes);
    std::vector<std::byte> parameters(module.kernel(name).parameter_bytes);
    for (std::size_t at = 0; at + sizeof memory <= parameters.size(); at += sizeof memory) {
      std::memcpy(parameters.data() + at, &memory, sizeof memory);
    }
    emulator::LaunchConfig config;
    config.block.x = 64;
    config.dynamic_shared_bytes = 4096;
    const emulator::Report report =
        machine.launch(module, name, config, parameters, short_schedule());
    for (const emulator::Fault& fault : report.faults) {
      require(!fault.text().empty(), "a fault without a text");
    }
  } catch (const emulator::Error& error) {
    require_sentence(error.what());
  }
}

}  // namespace

void fuzz_ptx(std::span<const std::byte> bytes) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  try {
    const emulator::Module module = emulator::Module::parse(text);
    emulator::Machine machine(emulator::chip_b200());
    for (const std::string& name : module.kernels()) launch(machine, module, name);
  } catch (const emulator::Error& error) {
    require_sentence(error.what());
    require(error.line() >= 0, "a negative line");
  }
}

}  // namespace fovea::test

FOVEA_FUZZ_ENTRY(fuzz_ptx)

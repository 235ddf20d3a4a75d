// Chips, and reports as text, table and JSON.
#include <algorithm>
#include <utility>

#include "emulator/emulator.h"

namespace fovea::emulator {
namespace {

constexpr std::array<std::pair<FaultKind, std::string_view>, 18> kKinds{{
    {FaultKind::none, "none"},
    {FaultKind::race, "race"},
    {FaultKind::missing_proxy_fence, "missing proxy fence"},
    {FaultKind::missing_fence, "missing fence"},
    {FaultKind::uninitialised, "uninitialised"},
    {FaultKind::in_flight, "in flight"},
    {FaultKind::deadlock, "deadlock"},
    {FaultKind::transaction_bytes, "transaction bytes"},
    {FaultKind::arrivals, "arrivals"},
    {FaultKind::barrier_misuse, "barrier misuse"},
    {FaultKind::tensor_memory, "tensor memory"},
    {FaultKind::out_of_bounds, "out of bounds"},
    {FaultKind::misaligned, "misaligned"},
    {FaultKind::divergent, "divergent"},
    {FaultKind::resources, "resources"},
    {FaultKind::trap, "trap"},
    {FaultKind::bad_argument, "bad argument"},
    {FaultKind::step_limit, "step limit"},
}};

struct Field {
  const char* name;
  std::uint64_t Counters::*member;
};

constexpr std::array<Field, 29> kFields{{
    {"warp_instructions", &Counters::warp_instructions},
    {"tensor_flops_f16", &Counters::tensor_flops_f16},
    {"tensor_flops_tf32", &Counters::tensor_flops_tf32},
    {"tensor_flops_fp8", &Counters::tensor_flops_fp8},
    {"tensor_flops_fp4", &Counters::tensor_flops_fp4},
    {"tensor_ops_int8", &Counters::tensor_ops_int8},
    {"mufu_lanes", &Counters::mufu_lanes},
    {"fma_lanes", &Counters::fma_lanes},
    {"alu_lanes", &Counters::alu_lanes},
    {"other_lanes", &Counters::other_lanes},
    {"shared_tensor_read_bytes", &Counters::shared_tensor_read_bytes},
    {"shared_read_bytes", &Counters::shared_read_bytes},
    {"shared_write_bytes", &Counters::shared_write_bytes},
    {"bank_conflicts", &Counters::bank_conflicts},
    {"global_read_bytes", &Counters::global_read_bytes},
    {"global_write_bytes", &Counters::global_write_bytes},
    {"cp_async_bytes", &Counters::cp_async_bytes},
    {"tma_load_bytes", &Counters::tma_load_bytes},
    {"tma_store_bytes", &Counters::tma_store_bytes},
    {"dsmem_bytes", &Counters::dsmem_bytes},
    {"tensor_memory_read_bytes", &Counters::tensor_memory_read_bytes},
    {"tensor_memory_write_bytes", &Counters::tensor_memory_write_bytes},
    {"tensor_memory_operand_bytes", &Counters::tensor_memory_operand_bytes},
    {"accumulator_read_bytes", &Counters::accumulator_read_bytes},
    {"accumulator_write_bytes", &Counters::accumulator_write_bytes},
    {"barrier_waits", &Counters::barrier_waits},
    {"barrier_blocks", &Counters::barrier_blocks},
    {"atomics", &Counters::atomics},
    {"", nullptr},
}};

constexpr std::size_t label_width = 28;

std::string quoted(std::string_view text) {
  constexpr const char* digits = "0123456789abcdef";
  std::string result = "\"";
  for (const char c : text) {
    const unsigned char byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      result += '\\';
      result += c;
    } else if (byte < 32 || byte > 126) {
      result += "\\u00";
      result += digits[byte >> 4];
      result += digits[byte & 15];
    } else {
      result += c;
    }
  }
  return result + "\"";
}

std::string json_counters(const Counters& counters) {
  std::string text = "{";
  for (const Field& field : kFields) {
    if (field.member == nullptr) continue;
    if (text.size() > 1) text += ", ";
    text += quoted(field.name) + ": " + std::to_string(counters.*field.member);
  }
  return text + "}";
}

std::string padded(const std::string& text, std::size_t width) {
  return text.size() >= width ? text : std::string(width - text.size(), ' ') + text;
}

// Warps that did the same work are one role: a run of neighbours with equal tensor, special and
// copy activity.
bool same_role(const Counters& a, const Counters& b) {
  return (a.tensor_flops_f16 + a.tensor_flops_fp8 != 0) ==
             (b.tensor_flops_f16 + b.tensor_flops_fp8 != 0) &&
         (a.tma_load_bytes != 0) == (b.tma_load_bytes != 0) &&
         (a.mufu_lanes != 0) == (b.mufu_lanes != 0);
}

}  // namespace

std::string_view name(FaultKind kind) {
  for (const auto& [candidate, text] : kKinds) {
    if (candidate == kind) return text;
  }
  return "unknown";
}

std::string Fault::text() const {
  std::string result(name(kind));
  if (line > 0) result += ", PTX line " + std::to_string(line);
  if (!source.empty()) result += " (" + source + ")";
  if (!instruction.empty()) result += ", " + instruction;
  result += ", CTA " + std::to_string(cta[0]) + "," + std::to_string(cta[1]) + "," +
            std::to_string(cta[2]) + ", " + agent;
  if (lane >= 0) result += " lane " + std::to_string(lane);
  return result + ": " + sentence;
}

Counters& Counters::operator+=(const Counters& other) {
  for (const Field& field : kFields) {
    if (field.member != nullptr) this->*field.member += other.*field.member;
  }
  return *this;
}

bool Report::has(FaultKind kind) const {
  return std::any_of(faults.begin(), faults.end(),
                     [kind](const Fault& fault) { return fault.kind == kind; });
}

std::string Report::table() const {
  std::vector<std::pair<std::string, Counters>> columns;
  for (std::size_t i = 0; i < per_warp.size();) {
    std::size_t end = i + 1;
    Counters sum = per_warp[i];
    while (end < per_warp.size() && same_role(per_warp[i], per_warp[end])) sum += per_warp[end++];
    columns.emplace_back("warps " + std::to_string(i) + "-" + std::to_string(end - 1), sum);
    i = end;
  }
  columns.emplace_back("all", total);
  std::string text = padded("", label_width);
  for (const auto& column : columns) text += padded(column.first, 15);
  text += "\n";
  for (const Field& field : kFields) {
    if (field.member == nullptr || total.*field.member == 0) continue;
    const std::string label(field.name);
    text += label + std::string(label_width - label.size(), ' ');
    for (const auto& column : columns) {
      text += padded(std::to_string(column.second.*field.member), 15);
    }
    text += "\n";
  }
  return text;
}

std::string Report::json() const {
  std::string text = "{\"kernel\": " + quoted(kernel) + ", \"faults\": [";
  for (std::size_t i = 0; i < faults.size(); ++i) {
    const Fault& f = faults[i];
    text += (i == 0 ? "" : ", ");
    text += "{\"kind\": " + quoted(name(f.kind)) + ", \"line\": " + std::to_string(f.line) +
            ", \"source\": " + quoted(f.source) + ", \"warp\": " + std::to_string(f.warp) +
            ", \"lane\": " + std::to_string(f.lane) + ", \"agent\": " + quoted(f.agent) +
            ", \"sentence\": " + quoted(f.sentence) + "}";
  }
  text += "], \"faults_not_listed\": " + std::to_string(faults_not_listed) +
          ", \"total\": " + json_counters(total) + ", \"per_warp\": [";
  for (std::size_t i = 0; i < per_warp.size(); ++i) {
    text += (i == 0 ? "" : ", ") + json_counters(per_warp[i]);
  }
  return text + "]}";
}

Chip chip_h100() { return {"h100", "sm_90a", 132, 232448, 65536, 0, 16}; }
Chip chip_h200() { return {"h200", "sm_90a", 132, 232448, 65536, 0, 16}; }
Chip chip_b200() { return {"b200", "sm_100a", 148, 232448, 65536, 512, 16}; }
Chip chip_b300() { return {"b300", "sm_103a", 148, 232448, 65536, 512, 16}; }

Chip find_chip(std::string_view name_or_arch) {
  for (const Chip& chip : {chip_h100(), chip_h200(), chip_b200(), chip_b300()}) {
    if (chip.name == name_or_arch || chip.arch == name_or_arch) return chip;
  }
  throw Error(0,
              "'" + std::string(name_or_arch) +
                  "' is not a chip known here: h100, h200, b200, b300, sm_90a, sm_100a, sm_103a.");
}

}  // namespace fovea::emulator

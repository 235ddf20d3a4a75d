#include "emulator/syntax.h"

#include <array>
#include <utility>

namespace fovea::emulator {
namespace {

struct TypeRow {
  std::string_view word;
  Type type;
  u32 bytes;
};

constexpr std::array<TypeRow, 39> kTypes{{
    {"pred", Type::pred, 0},       {"b8", Type::b8, 1},          {"b16", Type::b16, 2},
    {"b32", Type::b32, 4},         {"b64", Type::b64, 8},        {"b128", Type::b128, 16},
    {"u8", Type::uint8, 1},        {"u16", Type::uint16, 2},     {"u32", Type::uint32, 4},
    {"u64", Type::uint64, 8},      {"s8", Type::int8, 1},        {"s16", Type::int16, 2},
    {"s32", Type::int32, 4},       {"s64", Type::int64, 8},      {"f16", Type::f16, 2},
    {"f16x2", Type::f16x2, 4},     {"bf16", Type::bf16, 2},      {"bf16x2", Type::bf16x2, 4},
    {"f32", Type::f32, 4},         {"f32x2", Type::f32x2, 8},    {"f64", Type::f64, 8},
    {"tf32", Type::tf32, 4},       {"e4m3", Type::e4m3, 1},      {"e5m2", Type::e5m2, 1},
    {"e4m3x2", Type::e4m3x2, 2},   {"e5m2x2", Type::e5m2x2, 2},  {"e2m3", Type::e2m3, 1},
    {"e3m2", Type::e3m2, 1},       {"e2m1", Type::e2m1, 1},      {"e2m3x2", Type::e2m3x2, 2},
    {"e3m2x2", Type::e3m2x2, 2},   {"e2m1x2", Type::e2m1x2, 1},  {"e4m3x4", Type::e4m3x4, 4},
    {"e5m2x4", Type::e5m2x4, 4},   {"ue8m0", Type::ue8m0, 1},    {"ue4m3", Type::ue4m3, 1},
    {"ue8m0x2", Type::ue8m0x2, 2}, {"u16x2", Type::uint16x2, 4}, {"s16x2", Type::int16x2, 4},
}};

}  // namespace

Type type_from_word(std::string_view word) {
  for (const TypeRow& row : kTypes) {
    if (row.word == word) return row.type;
  }
  return Type::none;
}

std::string_view type_word(Type type) {
  for (const TypeRow& row : kTypes) {
    if (row.type == type) return row.word;
  }
  return "none";
}

u32 type_bytes(Type type) {
  for (const TypeRow& row : kTypes) {
    if (row.type == type) return row.bytes;
  }
  return 0;
}

bool is_float(Type type) { return type >= Type::f16 && type <= Type::tf32; }

bool is_signed(Type type) {
  return (type >= Type::int8 && type <= Type::int64) || type == Type::int16x2;
}

const Variable& variable_at(const ModuleData& module, const Function& function, u32 index) {
  const std::size_t i = index & 0xffffff;
  switch (static_cast<Scope>(index >> 24)) {
    case Scope::module: return module.variables[i];
    case Scope::results: return function.results[i];
    case Scope::parameters: return function.parameters[i];
    case Scope::locals: break;
  }
  return function.locals[i];
}

}  // namespace fovea::emulator

#include "runtime/source.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "runtime/device.h"
#include "runtime/jit.h"

namespace fovea::runtime {

namespace {

using core::DType;

std::string_view type_name(DType type) {
  switch (type) {
    case DType::bf16: return "bf16";
    case DType::f16: return "f16";
    case DType::e4m3: return "e4m3";
    case DType::e5m2: return "e5m2";
    case DType::s8: return "s8";
    default:
      throw std::invalid_argument("tensor cores here take bf16, f16, e4m3, e5m2 or s8 elements");
  }
}

void check(const WgmmaShape& s) {
  const std::string n = std::to_string(s.n);
  if (s.n < 8 || s.n > 256 || s.n % 8 != 0) {
    throw std::invalid_argument("wgmma n is " + n + ", but must be a multiple of 8 from 8 to 256");
  }
  const bool mixes = core::is_float8(s.a) && core::is_float8(s.b);
  if (s.a != s.b && !mixes) {
    throw std::invalid_argument("wgmma takes " + std::string(type_name(s.a)) + " and " +
                                std::string(type_name(s.b)) +
                                " operands only together with their own kind");
  }
  if (is_eight_bit(s.a) && (s.a_mn_major || s.b_mn_major)) {
    throw std::invalid_argument("wgmma takes 8-bit operands K-major only");
  }
  if (s.a_in_registers && s.a_mn_major) {
    throw std::invalid_argument("wgmma has no MN-major operand in registers");
  }
}

// "%first, %first+1, ..."
std::string places(int first, int count) {
  std::string text;
  for (int i = 0; i < count; ++i) {
    if (i > 0) text += ", ";
    text += "%" + std::to_string(first + i);
  }
  return text;
}

// constraint "=r", array "words": "=r"(words[0]), "=r"(words[1]), ...
std::string operands(std::string_view constraint, std::string_view array, int count) {
  std::string text;
  for (int i = 0; i < count; ++i) {
    if (i > 0) text += ", ";
    text += "\"" + std::string(constraint) + "\"(" + std::string(array) + "[" + std::to_string(i) +
            "])";
  }
  return text;
}

std::string place(int index) { return "%" + std::to_string(index); }

void check_words(int words) {
  if (words < 1 || words > 128 || (words & (words - 1)) != 0) {
    throw std::invalid_argument("tensor memory moves " + std::to_string(words) +
                                " columns at a time, but must move a power of two up to 128");
  }
}

}  // namespace

std::string wgmma_name(const WgmmaShape& s) {
  check(s);
  std::string name = "wgmma_m64n" + std::to_string(s.n) + (is_eight_bit(s.a) ? "k32" : "k16") +
                     (s.a == DType::s8 ? "_s32_" : "_f32_") + std::string(type_name(s.a));
  if (s.b != s.a) name += "_" + std::string(type_name(s.b));
  name += s.a_in_registers ? "_rs_" : "_ss_";
  name += s.a_mn_major ? 'm' : 'k';
  name += s.b_mn_major ? 'm' : 'k';
  return name;
}

std::string wgmma_text(const WgmmaShape& s, std::string_view name) {
  check(s);
  const int count = s.n / 2;  // accumulators per thread
  const bool integer = s.a == DType::s8;
  const int a_places = s.a_in_registers ? 4 : 1;
  std::string text = "__forceinline__ void " + (name.empty() ? wgmma_name(s) : std::string(name)) +
                     (integer ? "(int32" : "(float") + " (&d)[" + std::to_string(count) + "], " +
                     (s.a_in_registers ? "const uint32 (&a)[4]" : "uint64 a") +
                     ", uint64 b, bool accumulate) {\n  asm volatile(\"{ .reg .pred p;\\n\"\n";
  text += "\"setp.ne.b32 p, " + place(count + a_places + 1) + ", 0;\\n\"\n";
  text += "\"wgmma.mma_async.sync.aligned.m64n" + std::to_string(s.n) +
          (is_eight_bit(s.a) ? "k32" : "k16") + (integer ? ".s32." : ".f32.") +
          std::string(type_name(s.a)) + "." + std::string(type_name(s.b)) + " \"\n";
  text += "\"{" + places(0, count) + "}, \"\n\"";
  text += s.a_in_registers ? "{" + places(count, 4) + "}" : place(count);
  text += ", " + place(count + a_places) + ", p";
  if (!integer) text += ", 1, 1";
  if (!is_eight_bit(s.a)) {
    if (!s.a_in_registers) text += s.a_mn_major ? ", 1" : ", 0";
    text += s.b_mn_major ? ", 1" : ", 0";
  }
  text += "; }\"\n: " + operands(integer ? "+r" : "+f", "d", count) + "\n: ";
  text += s.a_in_registers ? operands("r", "a", 4) : "\"l\"(a)";
  text += ", \"l\"(b), \"r\"(static_cast<uint32>(accumulate))\n: \"memory\");\n}\n";
  return text;
}

std::string tcgen05_mma_name(const Tcgen05Mma& p) {
  if (p.cta_group != 1 && p.cta_group != 2) {
    throw std::invalid_argument("tcgen05 cta_group is " + std::to_string(p.cta_group) +
                                ", but must be 1 or 2");
  }
  return std::string("tcgen05_mma_") + (p.eight_bit ? "f8f6f4" : "f16") +
         (p.a_in_tensor_memory ? "_ts_cta" : "_ss_cta") + std::to_string(p.cta_group);
}

std::string tcgen05_mma_text(const Tcgen05Mma& p) {
  const std::string a = p.a_in_tensor_memory ? "[%1]" : "%1";
  return "__forceinline__ void " + tcgen05_mma_name(p) + "(TensorAddress d, " +
         (p.a_in_tensor_memory ? "TensorAddress" : "uint64") +
         " a, uint64 b, uint32 instruction, bool accumulate) {\n"
         "  asm volatile(\"{ .reg .pred p;\\n\"\n\"setp.ne.b32 p, %4, 0;\\n\"\n"
         "\"tcgen05.mma.cta_group::" +
         std::to_string(p.cta_group) + ".kind::" + (p.eight_bit ? "f8f6f4" : "f16") + " [%0], " +
         a + ", %2, %3, p; }\"\n:: \"r\"(d.value), " +
         (p.a_in_tensor_memory ? "\"r\"(a.value)" : "\"l\"(a)") +
         ", \"l\"(b), \"r\"(instruction), \"r\"(static_cast<uint32>(accumulate)) : "
         "\"memory\");\n}\n";
}

std::string tcgen05_load_text(int words) {
  check_words(words);
  const std::string n = std::to_string(words);
  return "__forceinline__ void tcgen05_load_32x32b_x" + n + "(uint32 (&words)[" + n +
         "], TensorAddress address) {\n  asm volatile(\"tcgen05.ld.sync.aligned.32x32b.x" + n +
         ".b32 {" + places(0, words) + "}, [" + place(words) +
         "];\"\n: " + operands("=r", "words", words) +
         "\n: \"r\"(address.value) : \"memory\");\n}\n";
}

std::string tcgen05_load_max_text(int words) {
  check_words(words);
  const std::string n = std::to_string(words);
  return "__forceinline__ void tcgen05_load_max_32x32b_x" + n + "(uint32 (&words)[" + n +
         "], float& largest, TensorAddress address) {\n"
         "  asm volatile(\"tcgen05.ld.red.sync.aligned.32x32b.x" +
         n + ".max.NaN.f32 {" + places(0, words) + "}, " + place(words) + ", [" + place(words + 1) +
         "];\"\n: " + operands("=r", "words", words) +
         ", \"=f\"(largest)\n: \"r\"(address.value) : \"memory\");\n}\n";
}

std::string tcgen05_store_text(int words) {
  check_words(words);
  const std::string n = std::to_string(words);
  return "__forceinline__ void tcgen05_store_32x32b_x" + n +
         "(TensorAddress address, const uint32 " + "(&words)[" + n +
         "]) {\n  asm volatile(\"tcgen05.st.sync.aligned.32x32b.x" + n + ".b32 [%0], {" +
         places(1, words) + "};\"\n:: \"r\"(address.value), " + operands("r", "words", words) +
         " : \"memory\");\n}\n";
}

std::string operand_name(DType dtype, int head_dim, int head_dim_v) {
  std::string text = std::string(type_name(dtype)) + "_d" + std::to_string(head_dim);
  if (head_dim_v != head_dim) text += "_" + std::to_string(head_dim_v);
  return text;
}

std::string kernel_text(const KernelSource& source) {
  std::string text;
  if (!source.instructions.empty()) {
    text +=
        "#include \"device/tcgen05.h\"\n#include \"device/wgmma.h\"\n"
        "namespace fovea::device {\n";
    for (const std::string& instruction : source.instructions) text += instruction;
    text += "}  // namespace fovea::device\n";
  }
  text += "#include \"" + source.include + "\"\n";
  // With the CTAs per multiprocessor: setmaxnreg needs a register count fixed at entry.
  text += "extern \"C\" __global__ void __launch_bounds__(" + std::to_string(source.threads) +
          ", " + std::to_string(source.ctas) + ")\nfovea_" + source.name +
          "(const __grid_constant__ " + source.params + " params) {\n  " + source.call +
          "(params);\n}\n";
  return text;
}

std::string kernel_name(std::string_view text) {
  constexpr std::string_view bounds = "__launch_bounds__";
  std::size_t from = text.find("__global__");
  if (const std::size_t at = text.find(bounds, from); at < text.size()) from = text.find(')', at);
  const std::size_t end = std::min(text.find('(', std::min(from, text.size())), text.size());
  const std::size_t begin = text.find_last_of(" \n", end) + 1;
  return std::string(text.substr(begin, end - begin));
}

std::shared_ptr<Kernel> load_kernel(Device& device, Jit& jit, std::string text, bool strict) {
  const std::string name = kernel_name(text);
  CompileRequest request;
  request.text = std::move(text);
  request.arch = device.properties().arch;
  request.format = device.properties().image_format;
  request.strict = strict;
  return device.load(jit.compile(request).image->bytes, name);
}

}  // namespace fovea::runtime

// Small programs and what their headers promise.
//
// Header lines of a file (all optional but one of `expect` and `fault`):
//   // chip: sm_90a      // block: 32     // grid: 1     // cluster: 1     // shared: 0
//   // expect: words of `out` in order, decimal or 0x..., "N*word" for repeats
//   // tensor: in order    Schedule::in_order_tensor
//   // output: what the kernel prints, with \n for line breaks
//   // counts: counters of the report and what they have to be, "tma_load_bytes 128 ..."
//   // fault: kind       at least this kind is reported, under every schedule
// The kernel is test(.param .u64 out); out has 4096 zeroed words.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace fovea::emulator::testing {

std::map<std::string, std::string> header_of(const std::string& ptx);
std::uint32_t number(const std::map<std::string, std::string>& header, const char* key,
                     std::uint32_t otherwise);
std::vector<std::uint32_t> words_of(const std::string& text);
std::vector<std::string> program_files();

}  // namespace fovea::emulator::testing

// Calls of functions that no module defines because the runtime does.
#pragma once

#include <string_view>

namespace fovea::emulator {

class Builder;

// False where `callee` is no such function. Its arguments lie in the caller's frame.
bool build_system_call(Builder& b, std::string_view callee);

}  // namespace fovea::emulator

#include "builders.h"
#include "execute.h"
namespace fovea::emulator { void build_tcgen05(Builder& b) { b.fail("tcgen05 is not supported."); } }

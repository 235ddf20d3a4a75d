// Built with -mavx2 -mfma where the compiler targets x86-64; called only where both exist.
#define FOVEA_LANES avx2
#include "emulator/lanes_body.h"

// The build of lanes.def that every processor runs.
#define FOVEA_LANES baseline
#include "emulator/lanes_body.h"

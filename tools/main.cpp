#include <string>
#include <vector>

#include "tools/program.h"

int main(int count, char** values) {
  const std::vector<std::string> arguments(values + (count > 0 ? 1 : 0), values + count);
  return fovea::tools::run_program(arguments);
}

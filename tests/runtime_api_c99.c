/* A C99 program's view of the library: the header compiles, a call computes, a fault is told. */
#include "tests/runtime_api_c99.h"

#include <stdlib.h>
#include <string.h>

#include "fovea/fovea.h"

/* One query, two keys, q = 0: out is the mean of v, lse = ln 2. Returns the number of the step that
 * went wrong, or 0. */
int fovea_c99_smoke(float out[4], float* lse, char* explanation, size_t capacity) {
  const float q[4] = {0, 0, 0, 0};
  const float k[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  const float v[8] = {0, 1, 2, 3, 4, 5, 6, 7};
  const int64_t lse_shape[4] = {1, 1, 1, 1};
  fovea_problem problem;
  fovea_options options;
  fovea_statistics statistics;
  fovea_plan* plan = NULL;
  void* workspace = NULL;
  size_t bytes = 0;
  size_t length = 0;
  int step = 0;

  if (fovea_problem_init(&problem, sizeof problem) != FOVEA_OK) return 1;
  if (fovea_options_init(&options, sizeof options) != FOVEA_OK) return 2;
  if (fovea_statistics_init(&statistics, sizeof statistics) != FOVEA_OK) return 3;
  problem.q = fovea_tensor_bshd(q, FOVEA_F32, 1, 1, 1, 4);
  problem.k = fovea_tensor_bshd(k, FOVEA_F32, 1, 2, 1, 4);
  problem.v = fovea_tensor_bhsd(v, FOVEA_F32, 1, 2, 1, 4);
  problem.out = fovea_tensor_bshd(out, FOVEA_F32, 1, 1, 1, 4);
  problem.lse = fovea_tensor_contiguous(lse, FOVEA_F32, lse_shape);
  options.device = FOVEA_DEVICE_CPU;
  options.threads = 1;
  if (fovea_plan_create(&problem, &options, &plan) != FOVEA_OK) return 4;
  if (fovea_plan_workspace_bytes(plan, &bytes) != FOVEA_OK) step = 5;
  workspace = malloc(bytes);
  if (step == 0 && workspace == NULL && bytes > 0) step = 6;
  if (step == 0 && fovea_plan_run(plan, &problem, workspace, bytes, &statistics) != FOVEA_OK) {
    step = 7;
  }
  if (step == 0 && statistics.tiles_full + statistics.tiles_partial == 0) step = 8;
  if (step == 0 && fovea_plan_explain(plan, NULL, 0, &length) != FOVEA_OK) step = 9;
  if (step == 0 && fovea_plan_explain(plan, explanation, capacity, NULL) != FOVEA_OK) step = 10;
  if (step == 0 && strlen(explanation) != (length < capacity ? length : capacity - 1)) step = 11;
  fovea_plan_destroy(plan);
  free(workspace);
  if (step != 0) return step;

  problem.softcap = -1.0f;
  if (fovea_attention(&problem, NULL, NULL) != FOVEA_INVALID_ARGUMENT) return 12;
  if (strstr(fovea_last_error(), "softcap is -1") == NULL) return 13;
  problem.softcap = 0.0f;
  if (fovea_attention(&problem, NULL, NULL) != FOVEA_OK) return 14;
  if (fovea_last_error()[0] != '\0') return 15;
  if (strchr(fovea_version(), '.') == NULL) return 16;
  return 0;
}

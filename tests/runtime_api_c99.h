/* What runtime_api_test.cpp calls in runtime_api_c99.c. */
#ifndef FOVEA_TESTS_RUNTIME_API_C99_H
#define FOVEA_TESTS_RUNTIME_API_C99_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

int fovea_c99_smoke(float out[4], float* lse, char* explanation, size_t capacity);

#ifdef __cplusplus
}
#endif

#endif

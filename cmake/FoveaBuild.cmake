# How everything in this repository is compiled, and fovea_layer(), which makes a folder a target.

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Release, Debug or RelWithDebInfo" FORCE)
endif()

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

# No -march: Highway compiles each kernel once per instruction set and chooses at run time, so one
# build runs on every machine of an architecture.
set(CMAKE_CXX_FLAGS_RELEASE "-O3 -DNDEBUG")

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
endif()

add_library(fovea_options INTERFACE)
target_compile_options(fovea_options INTERFACE -Wall -Wextra -Wpedantic -Wshadow -Wconversion)
# A fused multiply-add is where the source says so, and not where a compiler finds one: results do
# not depend on the compiler, and rounding arguments in comments stay true.
target_compile_options(fovea_options INTERFACE -ffp-contract=off)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # False alarms inside <string> and <algorithm> (GCC bugs 105651 and 107852), mended in GCC 13.
  target_compile_options(fovea_options INTERFACE -Wno-restrict -Wno-array-bounds)
endif()
if(FOVEA_WERROR)
  target_compile_options(fovea_options INTERFACE -Werror)
endif()
if(FOVEA_SANITIZE)
  # Global on purpose: a sanitizer that sees half of a program reports the other half's bugs.
  add_compile_options(-fsanitize=${FOVEA_SANITIZE} -fno-sanitize-recover=all
                      -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${FOVEA_SANITIZE})
endif()

# fovea_include_tree(<name> [FILES <file>...])
#
# Sets <name>_INCLUDE_DIR to a directory that holds a link to the current folder and nothing else,
# or that folder with links to the named files only. It is the whole reason why
# `#include "core/mask.h"` compiles in a target that links fovea_core and fails in any other.
function(fovea_include_tree name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "FILES")
  get_filename_component(folder ${CMAKE_CURRENT_SOURCE_DIR} NAME)
  set(tree ${PROJECT_BINARY_DIR}/include-${name})
  if(arg_FILES)
    file(MAKE_DIRECTORY ${tree}/${folder})
    foreach(file IN LISTS arg_FILES)
      file(CREATE_LINK ${CMAKE_CURRENT_SOURCE_DIR}/${file} ${tree}/${folder}/${file} SYMBOLIC)
    endforeach()
  else()
    file(MAKE_DIRECTORY ${tree})
    file(CREATE_LINK ${CMAKE_CURRENT_SOURCE_DIR} ${tree}/${folder} SYMBOLIC)
  endif()
  set(${name}_INCLUDE_DIR ${tree} PARENT_SCOPE)
endfunction()

# fovea_embed(<target> <function> ROOT <dir> FILES <file>...)
#
# Adds to <target> a generated source that defines fovea::device::<function>(): the text of FILES,
# each named by its path from ROOT (cmake/device_files.h declares the type).
function(fovea_embed target function)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "ROOT" "FILES")
  set(output ${CMAKE_CURRENT_BINARY_DIR}/${target}_${function}.cpp)
  set(script ${PROJECT_SOURCE_DIR}/cmake/embed.cmake)
  add_custom_command(
    OUTPUT ${output}
    COMMAND ${CMAKE_COMMAND} -D ROOT=${arg_ROOT} -D FUNCTION=${function} -D OUTPUT=${output} -D
            "FILES=${arg_FILES}" -P ${script}
    DEPENDS ${arg_FILES} ${script}
    COMMENT "Embedding kernel text: ${function}"
    VERBATIM)
  target_sources(${target} PRIVATE ${output})
endfunction()

# fovea_layer(<name> [LINKS <target>...] [PRIVATE_LINKS <target>...])
#
# Makes the current folder, src/<name>, the target fovea_<name>: every .cpp in it, its headers as
# "<name>/...", and the layers it may see. Header-only folders become INTERFACE libraries.
# LINKS are seen through its headers too, PRIVATE_LINKS by its sources alone.
function(fovea_layer name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "LINKS;PRIVATE_LINKS")
  fovea_include_tree(${name})
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.cpp)
  set(target fovea_${name})
  if(sources)
    add_library(${target} STATIC ${sources})
    target_include_directories(${target} PUBLIC ${${name}_INCLUDE_DIR})
    target_link_libraries(${target} PUBLIC ${arg_LINKS} PRIVATE ${arg_PRIVATE_LINKS} fovea_options)
  else()
    add_library(${target} INTERFACE)
    target_include_directories(${target} INTERFACE ${${name}_INCLUDE_DIR})
    target_link_libraries(${target} INTERFACE ${arg_LINKS})
  endif()
endfunction()

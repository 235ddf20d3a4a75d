# The installed library: one archive or shared object made of every layer's objects, so that nobody
# outside this build has to know that layers exist.
#
# The target is not called `fovea`: the program is, and Ninja has one name space for both.

set(objects "")
foreach(layer IN ITEMS core cpu model emulator device runtime)
  get_target_property(type fovea_${layer} TYPE)
  if(NOT type STREQUAL "INTERFACE_LIBRARY")
    list(APPEND objects $<TARGET_OBJECTS:fovea_${layer}>)
  endif()
endforeach()

add_library(fovea_library ${objects})
add_library(fovea::fovea ALIAS fovea_library)
set_target_properties(
  fovea_library
  PROPERTIES OUTPUT_NAME fovea
             EXPORT_NAME fovea
             LINKER_LANGUAGE CXX
             VERSION ${PROJECT_VERSION}
             SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
             ARCHIVE_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib
             LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib)
target_compile_features(fovea_library PUBLIC cxx_std_20)
target_include_directories(
  fovea_library PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                       $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
find_package(OpenMP REQUIRED COMPONENTS CXX)
find_package(hwy REQUIRED CONFIG)
target_link_libraries(fovea_library PRIVATE OpenMP::OpenMP_CXX hwy::hwy ${CMAKE_DL_LIBS})

include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/fovea)
install(TARGETS fovea_library EXPORT fovea-targets)
install(EXPORT fovea-targets NAMESPACE fovea:: DESTINATION ${package_dir})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/fovea DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/fovea-config.cmake.in
                              ${PROJECT_BINARY_DIR}/fovea-config.cmake
                              INSTALL_DESTINATION ${package_dir})
# Before 1.0 a minor version may change the interface, so it has to match.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/fovea-config-version.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/fovea-config.cmake
              ${PROJECT_BINARY_DIR}/fovea-config-version.cmake DESTINATION ${package_dir})
configure_file(${PROJECT_SOURCE_DIR}/cmake/fovea.pc.in ${PROJECT_BINARY_DIR}/fovea.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/fovea.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

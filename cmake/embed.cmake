# cmake -D ROOT=<dir> -D FILES=<a;b;...> -D FUNCTION=<name> -D OUTPUT=<file.cpp> -P embed.cmake
#
# Writes a C++ file that defines fovea::device::<FUNCTION>(): the bytes of FILES, named relative to
# ROOT. fovea_embed() in FoveaBuild.cmake calls it.
#
# Bytes as numbers, since a string literal would need escapes and has a length limit.

list(SORT FILES)
set(arrays "")
set(table "")
set(count 0)
foreach(file IN LISTS FILES)
  file(RELATIVE_PATH name ${ROOT} ${file})
  file(SIZE ${file} size)
  if(size EQUAL 0)
    continue() # a zero-length array is not C++
  endif()
  file(READ ${file} hex HEX)
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${hex}")
  string(APPEND arrays "// ${name}\nconst unsigned char file_${count}[] = {${bytes}};\n")
  string(APPEND table
         "    File{\"${name}\", {reinterpret_cast<const char*>(file_${count}), ${size}}},\n")
  math(EXPR count "${count} + 1")
endforeach()

if(count EQUAL 0)
  set(body "std::span<const File> ${FUNCTION}() { return {}; }\n")
else()
  set(body "namespace {\n\n${arrays}\nconst File table[] = {\n${table}};\n\n}  // namespace\n\n")
  string(APPEND body "std::span<const File> ${FUNCTION}() { return table; }\n")
endif()
file(WRITE ${OUTPUT} "#include \"device/files.h\"\n\nnamespace fovea::device {\n\n${body}\n"
                     "}  // namespace fovea::device\n")

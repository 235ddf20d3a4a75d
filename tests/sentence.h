// Tests of sentences: what an Error says, and what a text has to hold.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "fovea/fovea.hpp"

namespace fovea::test {

inline std::string sentence_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

inline void expect_in(const std::string& text, const std::string& fragment) {
  EXPECT_NE(text.find(fragment), std::string::npos) << '"' << fragment << "\" is not in:\n" << text;
}

}  // namespace fovea::test

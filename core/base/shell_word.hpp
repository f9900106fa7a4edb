// Commands that are printed to be typed again.
#pragma once
#include <string>
#include <string_view>

namespace ballast {

/// `text` as one word of a POSIX shell's command line, which reads it back byte for byte: one line
/// of printable UTF-8, whatever is in it but NUL.  A newline is taken from IFS, which a shell sets
/// when it starts; other bytes that no line should hold from printf.
std::string shell_word(std::string_view text);

/// `text` with a question mark for every byte that a comment of one line cannot hold: controls, and
/// where it is no UTF-8 all beyond ASCII.
std::string comment_text(std::string text);

}  // namespace ballast

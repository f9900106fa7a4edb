// Small files of text (JSON, decks) that another program reads while they are written again.
#pragma once
#include <string>
#include <string_view>

namespace ballast {

/// Writes `text` to `path`, whole or not at all: beside it first, under its name and `suffix`, then
/// in its place, so a full disk or a crash leaves what was there.  A link's target is written.
/// Where the folder takes no new file the file itself is written over.  What is no regular file (a
/// terminal, a pipe) gets the text; a pipe that nobody reads is an error, not a wait.
/// Returns why it cannot, or "".
std::string write_text(const std::string& path, std::string_view text,
                       const std::string& suffix = ".new");

/// The same; throws Error naming the file.
void require_written(const std::string& path, std::string_view text);

/// Cuts off what stands behind the last line break of a file of lines: a writer that died, or whose
/// disk was full, left it.  Does nothing where there is no regular file.
void drop_torn_line(const std::string& path);

/// Why write_text would fail as far as can be told before there is a text, or "".  Leaves nothing.
std::string unwritable(const std::string& path);

}  // namespace ballast

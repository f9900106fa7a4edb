// Deck reader: TOML text, cases and command-line overrides in, a validated Deck out.  All problems
// are found before any is reported.
#pragma once
#include <string>
#include <vector>

#include "core/config/deck.hpp"
#include "core/config/deck_rules.hpp"

namespace ballast {

/// Deck of `text`.  Later wins: the file's keys, those of case `case_name` ("": no case), then
/// `overrides` ("block.key=value"; values are TOML, bare words are text, text lists may be written
/// a,b).  `file` stands for the text in messages.  Every case is validated, chosen or not.  Throws
/// Error whose text holds all problems, one a line, each as "file:line: message" (or "command line:
/// block.key=value: message").
Deck parse_deck(const std::string& text, const std::string& file,
                const std::vector<std::string>& overrides = {}, const std::string& case_name = "",
                DeckNeeds needs = {});

/// The same as a Config.
Config parse_config(const std::string& text, const std::string& file,
                    const std::vector<std::string>& overrides = {},
                    const std::string& case_name = "", DeckNeeds needs = {});

/// Names of the [[case]] list in file order; empty without one.  Throws Error for text that is no
/// TOML or a case without a name.
std::vector<std::string> parse_deck_cases(const std::string& text, const std::string& file);

/// Bytes of a deck file.  Throws Error naming it: missing, unreadable, a folder, or larger than any
/// deck.
std::string read_deck_text(const std::string& path);

/// parse_deck and parse_deck_cases of a file.
Deck read_deck(const std::string& path, const std::vector<std::string>& overrides = {},
               const std::string& case_name = "", DeckNeeds needs = {});
std::vector<std::string> deck_cases(const std::string& path);

}  // namespace ballast

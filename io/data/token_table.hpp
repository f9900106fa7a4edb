// Table of tokens of a Hugging Face tokenizer.json: tells whether a token file was made with the
// tokenizer of the model that reads it.
#pragma once
#include <cstdint>
#include <string>

namespace ballast {

/// Whether a folder (may be "") has a tokenizer.json.
bool has_tokenizer(const std::string& folder);

/// CRC-32 of "ID, tab, token, newline" in the order of ids, added tokens included: the same for
/// every file that states the same table.  Twin: app/data/recipe.py.  Errors: no tokenizer.json,
/// or one without a vocabulary.
std::uint64_t token_table_crc32(const std::string& folder);

}  // namespace ballast

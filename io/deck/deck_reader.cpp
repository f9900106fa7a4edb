#include "io/deck/deck_reader.hpp"

#include <toml++/toml.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <set>

#include "core/base/utf8.hpp"
#include "io/model/huggingface.hpp"

namespace ballast {
namespace {

constexpr std::size_t kMaximumBytes = 1 << 20;  // a deck is some kilobytes; more is a wrong file
constexpr std::size_t kMaximumProblems = 50;    // printed
constexpr int kMaximumSyntaxProblems = 20;      // searched for, since each needs another parse
constexpr std::size_t kMaximumQuote = 80;       // bytes of a foreign text in a message
constexpr std::size_t kMaximumDots = 64;        // of a key

/// Foreign text for a message: one line, no control characters, not endless.
std::string printable(std::string_view text) {
  std::string out;
  for (char c : text.substr(0, kMaximumQuote)) {
    const auto u = static_cast<unsigned char>(c);
    if (u < 0x20 || u >= 0x7f)
      out += fmt::format("\\x{:02x}", u);
    else
      out += c;
  }
  return text.size() > kMaximumQuote ? out + "..." : out;
}

/// Where the text that begins with a quote at `begin` ends: behind its quotes, or at the line's
/// end.
std::size_t end_of_text(std::string_view deck, std::size_t begin) {
  const char quote = deck[begin];
  const bool triple = deck.substr(begin, 3) == std::string(3, quote);
  const std::string end = triple ? std::string(3, quote) : std::string(1, quote);
  std::size_t at = begin + end.size();
  while (at < deck.size() && deck.substr(at, end.size()) != end) {
    if (!triple && deck[at] == '\n') return at;
    at += quote == '"' && deck[at] == '\\' ? 2 : 1;
  }
  at = std::min(deck.size(), at + end.size());
  for (int i = 0; triple && i < 2 && deck.substr(at).starts_with(quote); ++i)
    ++at;  // up to two quotes may stand before the three that end it
  return at;
}

/// The parser goes one call deeper for each dot of a key, until its stack ends.
void refuse_deep_keys(std::string_view deck, const std::string& path) {
  std::size_t dots = 0;
  for (std::size_t i = 0; i < deck.size(); ++i) {
    const char c = deck[i];
    if (c == '#') {
      i = std::min(deck.find('\n', i), deck.size()) - 1;
    } else if (c == '"' || c == '\'') {
      i = end_of_text(deck, i) - 1;
    } else if (c == '.') {
      require(++dots <= kMaximumDots,
              "{}:{}: a key of more than {} parts; a deck's have two, "
              "block.key",
              path, std::count(deck.begin(), deck.begin() + i, '\n') + 1, dots);
    } else if (std::isalnum(static_cast<unsigned char>(c)) == 0 &&
               std::string_view("_- \t").find(c) == std::string_view::npos) {
      dots = 0;
    }
  }
}

/// What a TOML node is, in the words of type_name, with its value where that is short.
std::string found(const toml::node& node) {
  if (const auto* v = node.as_string()) return "the text \"" + printable(v->get()) + "\"";
  if (const auto* v = node.as_integer()) return fmt::format("the integer {}", v->get());
  if (const auto* v = node.as_floating_point()) return "the number " + to_text(v->get());
  if (const auto* v = node.as_boolean()) return v->get() ? "true" : "false";
  if (node.is_array()) return "a list";
  if (node.is_table()) return "a table";
  return "a date or time";
}

template <class T>
std::optional<T> scalar(const toml::node& node) {
  if constexpr (std::is_same_v<T, double>) {
    if (const auto* v = node.as_integer()) return static_cast<double>(v->get());
    if (const auto* v = node.as_floating_point()) return v->get();
  } else if constexpr (std::is_same_v<T, std::int64_t>) {
    if (const auto* v = node.as_integer()) return v->get();
  } else if constexpr (std::is_same_v<T, bool>) {
    if (const auto* v = node.as_boolean()) return v->get();
  } else {
    if (const auto* v = node.as_string()) return v->get();
  }
  return std::nullopt;
}

template <class T>
struct is_vector : std::false_type {};
template <class T>
struct is_vector<std::vector<T>> : std::true_type {};

/// The node as the type that the schema wants; `wrong` is the offending node otherwise (an element
/// of a list, or the node itself).
std::optional<DeckValue> convert(const toml::node& node, const KeySpec& spec,
                                 const toml::node*& wrong) {
  wrong = &node;
  return std::visit(
      [&](const auto& prototype) -> std::optional<DeckValue> {
        using T = std::decay_t<decltype(prototype)>;
        if constexpr (is_vector<T>::value) {
          const toml::array* array = node.as_array();
          if (array == nullptr) return std::nullopt;
          T values;
          for (const toml::node& element : *array) {
            const auto one = scalar<typename T::value_type>(element);
            if (!one) {
              wrong = &element;
              return std::nullopt;
            }
            values.push_back(*one);
          }
          return values;
        } else {
          const auto one = scalar<T>(node);
          return one ? std::optional<DeckValue>(*one) : std::nullopt;
        }
      },
      spec.default_value);
}

/// How a value of the key's type is written, for type errors.
const char* example(const DeckValue& value) {
  static constexpr const char* examples[] = {
      "true", "8", "0.1", "\"text\"", "[1024, 4096]", "[0.5, 0.5]", "[\"one\", \"two\"]"};
  return examples[value.index()];
}

struct PlacedProblem {
  std::size_t line;  // for the order; the command line comes last
  std::string text;
};
constexpr std::size_t kCommandLine = std::numeric_limits<std::size_t>::max();

struct Setting {
  std::string path;
  DeckValue value;
  std::string place;
  Origin origin = Origin::file;
};

struct Case {
  std::string name;
  std::vector<Setting> settings;
};

class Reader {
 public:
  explicit Reader(std::string file) : file_(std::move(file)) {}

  void read_text(const std::string& text);
  void read_override(const std::string& argument);
  void add(std::size_t line, const std::string& message) {
    problems_.push_back({line, (line == kCommandLine ? "" : place(line) + ": ") + message});
  }
  /// Throws when there are problems.
  void finish(const std::vector<std::string>& more = {});

  std::vector<Setting> base, overrides;
  std::vector<Case> cases;
  std::set<Key> faulty;  ///< keys whose value is not what the user meant
  bool sound_syntax = true;

 private:
  std::string place(std::size_t line) const {
    return line == 0 ? file_ : fmt::format("{}:{}", file_, line);
  }
  toml::table parse(const std::string& text);
  void read_block(const std::string& name, std::size_t line, const toml::node& node,
                  std::vector<Setting>& into);
  void read_case(const toml::table& table, std::size_t line);
  /// `where` is the place of the value, `line` its order.
  void read_key(const std::string& block, const std::string& key, const toml::node& node,
                std::size_t line, const std::string& where, std::vector<Setting>& into);
  bool known(const std::string& block, const std::string& key, std::size_t line,
             const std::string& where);
  void doubt(const std::string& block);

  std::string file_;
  std::vector<PlacedProblem> problems_;
};

/// Whether blanking this line out leaves the rest of the file readable: a whole key or header, and
/// no list that goes on below.
bool stands_alone(std::string_view line) {
  const auto first = line.find_first_not_of(" \t");
  if (first == std::string_view::npos || line.find("\"\"\"") != std::string_view::npos ||
      line.find("'''") != std::string_view::npos)
    return false;
  if (line[first] == '[') return true;
  const auto equals = line.find('=');
  if (equals == std::string_view::npos) return false;
  return std::count(line.begin(), line.end(), '[') == std::count(line.begin(), line.end(), ']');
}

toml::table Reader::parse(const std::string& text) {
  // The parser stops at the first error.  To find the others, the line is taken out and the rest
  // read again.
  std::string rest = text;
  for (int attempt = 0; attempt < kMaximumSyntaxProblems; ++attempt) {
    try {
      return toml::parse(std::string_view(rest), std::string_view(file_));
    } catch (const toml::parse_error& e) {
      sound_syntax = false;
      const std::size_t line = e.source().begin.line;
      add(line, "not valid TOML: " + printable(e.description()));
      std::size_t begin = 0;
      for (std::size_t l = 1; l < line && begin != std::string::npos; ++l) {
        begin = rest.find('\n', begin);
        if (begin != std::string::npos) ++begin;
      }
      if (line == 0 || begin == std::string::npos || begin >= rest.size()) break;
      const std::size_t end = std::min(rest.find('\n', begin), rest.size());
      if (!stands_alone(std::string_view(rest).substr(begin, end - begin))) break;
      // Keys below a header that is taken out would move to the block above, so the header's keys
      // go with it.
      const bool header = rest[rest.find_first_not_of(" \t", begin)] == '[';
      if (header) break;
      std::fill(rest.begin() + static_cast<std::ptrdiff_t>(begin),
                rest.begin() + static_cast<std::ptrdiff_t>(end), ' ');
    }
  }
  return {};
}

void Reader::read_text(const std::string& text) {
  const toml::table root = parse(text);
  for (const auto& [key, node] : root) {
    const std::string name(key.str());
    const std::size_t line = key.source().begin.line;
    if (name != "case") {
      read_block(name, line, node, base);
      continue;
    }
    const toml::array* list = node.as_array();
    if (list == nullptr) {
      add(line, "case is a list of tables; write [[case]] with double brackets");
      continue;
    }
    for (const toml::node& element : *list) {
      const std::size_t at = element.source().begin.line;
      if (const toml::table* table = element.as_table())
        read_case(*table, at != 0 ? at : line);
      else
        add(at != 0 ? at : line,
            "a case is a table with a name and overrides, found " + found(element));
    }
  }
}

void Reader::doubt(const std::string& block) {
  for (const auto& key : block_keys(block)) faulty.insert(block + "." + key);
}

void Reader::read_block(const std::string& name, std::size_t line, const toml::node& node,
                        std::vector<Setting>& into) {
  const BlockSpec* block = find_block(name);
  if (block == nullptr) {
    std::vector<std::string> names{"case"}, owners;
    for (const auto& b : deck_blocks()) {
      names.push_back(b.name);
      if (find_key(b.name + "." + name) != nullptr) owners.push_back(b.name);
    }
    if (!node.is_table() && !owners.empty()) {
      for (const auto& owner : owners) faulty.insert(owner + "." + name);
      add(line, fmt::format("key {} stands outside its block; it belongs to [{}]", printable(name),
                            fmt::join(owners, "] or [")));
      return;
    }
    const std::string near = nearest_name(name, names);
    if (!near.empty()) doubt(near);
    names.erase(names.begin());
    add(line,
        fmt::format("unknown {} {}{}; blocks: {}",
                    node.is_table() ? "block" : "key outside a block:", printable(name),
                    near.empty() ? "" : " (did you mean [" + near + "]?)", fmt::join(names, ", ")));
    return;
  }
  const toml::table* table = node.as_table();
  if (table == nullptr) {
    doubt(name);
    add(line, fmt::format("{} is a block, found {}; write [{}] and its keys below", name,
                          found(node), name));
    return;
  }
  for (const auto& [key, value] : *table) {
    const std::size_t at = key.source().begin.line;
    read_key(name, std::string(key.str()), value, at, place(at), into);
  }
}

void Reader::read_case(const toml::table& table, std::size_t line) {
  Case one;
  if (const toml::node* name = table.get("name")) {
    const std::size_t at = name->source().begin.line;
    if (const auto text = scalar<std::string>(*name); !text || text->empty())
      add(at, "the name of a case is a text that is not empty, found " + found(*name));
    else
      one.name = *text;
    for (const Case& other : cases)
      if (!one.name.empty() && other.name == one.name)
        add(at, fmt::format("two cases have the name \"{}\"", printable(one.name)));
  } else {
    add(line, "a case needs a name: name = \"...\"");
  }
  for (const auto& [key, node] : table) {
    const std::string name(key.str());
    const std::size_t at = key.source().begin.line;
    if (name == "name") continue;
    const auto dot = name.find('.');
    if (dot != std::string::npos)
      read_key(name.substr(0, dot), name.substr(dot + 1), node, at, place(at), one.settings);
    else
      read_block(name, at, node, one.settings);
  }
  std::set<std::string> stated;  // a.b = 1 and "a.b" = 2 are two keys to TOML
  for (const Setting& setting : one.settings)
    if (!stated.insert(setting.path).second)
      add(line, fmt::format("case \"{}\" states {} twice", printable(one.name), setting.path));
  cases.push_back(std::move(one));
}

bool Reader::known(const std::string& block, const std::string& key, std::size_t line,
                   const std::string& where) {
  const std::string path = block + "." + key;
  if (find_key(path) != nullptr) return true;
  const std::string begin = line == kCommandLine ? where + ": " : "";
  if (const RetiredKey* retired = find_retired(path)) {
    faulty.insert(retired->successor);
    add(line, fmt::format("{}{} is no key any more{}: {}", begin, path,
                          retired->successor.empty() ? "" : "; use " + retired->successor,
                          retired->remark));
    return false;
  }
  const BlockSpec* spec = find_block(block);
  if (spec != nullptr) {
    std::vector<std::string> keys = block_keys(block), elsewhere;
    for (const auto& other : deck_blocks())
      if (find_key(other.name + "." + key) != nullptr) elsewhere.push_back(other.name + "." + key);
    std::string near = nearest_name(key, keys);
    if (!near.empty())
      near = block + "." + near;
    else if (!elsewhere.empty())
      near = elsewhere.front();
    if (!near.empty()) faulty.insert(near);
    add(line, fmt::format("{}unknown key {}{}; keys of [{}]: {}", begin, printable(path),
                          near.empty() ? "" : " (did you mean " + near + "?)", block,
                          fmt::join(keys, ", ")));
    return false;
  }
  std::vector<std::string> paths;
  for (const KeySpec& k : deck_schema()) paths.push_back(k.path());
  const std::string near = nearest_name(path, paths);
  if (!near.empty()) faulty.insert(near);
  std::vector<std::string> blocks;
  for (const auto& b : deck_blocks()) blocks.push_back(b.name);
  add(line,
      fmt::format("{}unknown key {}{}; blocks: {}", begin, printable(path),
                  near.empty() ? "" : " (did you mean " + near + "?)", fmt::join(blocks, ", ")));
  return false;
}

void Reader::read_key(const std::string& block, const std::string& key, const toml::node& node,
                      std::size_t line, const std::string& where, std::vector<Setting>& into) {
  const std::string path = block + "." + key, begin = line == kCommandLine ? where + ": " : "";
  if (node.is_table() && find_key(path) == nullptr && find_block(block) != nullptr)
    return add(line,
               fmt::format(
                   "{}{} is a table inside a block; decks have two levels, [block] and key = value",
                   begin, printable(path)));
  if (!known(block, key, line, where)) return;
  const KeySpec& spec = *find_key(path);
  if (node.is_table()) {
    faulty.insert(path);
    add(line, fmt::format(
                  "{}{} expects {}, found a table; decks have two levels, [block] and key = value",
                  begin, path, type_name(spec.default_value)));
    return;
  }
  const toml::node* wrong = nullptr;
  const auto value = convert(node, spec, wrong);
  if (!value) {
    faulty.insert(path);
    add(line,
        fmt::format("{}{} expects {}{}, found {}{}; write it like {}", begin, path,
                    type_name(spec.default_value), spec.unit.empty() ? "" : " [" + spec.unit + "]",
                    wrong != &node ? "a list with " : "", found(*wrong),
                    example(spec.default_value)));
    return;
  }
  if (const std::string problem = value_problem(spec, *value); !problem.empty()) {
    faulty.insert(path);
    add(line, begin + problem);
    return;
  }
  into.push_back({path, *value, where, line == kCommandLine ? Origin::command_line : Origin::file});
}

/// A value of the command line: TOML, or a bare word, or a,b for text lists.
toml::table override_value(const std::string& text, const KeySpec* spec) {
  const auto wants = [spec](auto t) {
    return spec != nullptr && std::holds_alternative<decltype(t)>(spec->default_value);
  };
  const bool wants_text = wants(std::string()), wants_texts = wants(std::vector<std::string>());
  if (text.find('\n') == std::string::npos) {
    try {
      toml::table table = toml::parse("v = " + text);
      const toml::node* node = table.size() == 1 ? table.get("v") : nullptr;
      if (node && wants_texts && node->is_string())
        return toml::table{{"v", toml::array{**node->as_string()}}};
      if (node && (!wants_text || node->is_string()) && (!wants_texts || node->is_array()))
        return table;
    } catch (const toml::parse_error&) {  // a bare word
    }
  }
  if (!wants_texts) return toml::table{{"v", text}};
  toml::array words;
  std::string inner = text;
  if (inner.size() >= 2 && inner.front() == '[' && inner.back() == ']')
    inner = inner.substr(1, inner.size() - 2);
  for (std::size_t begin = 0; begin < inner.size();) {
    const std::size_t end = std::min(inner.find(',', begin), inner.size());
    if (end > begin) words.push_back(inner.substr(begin, end - begin));
    begin = end + 1;
  }
  return toml::table{{"v", std::move(words)}};
}

void Reader::read_override(const std::string& argument) {
  const std::string where = "command line: " + printable(argument);
  if (!is_utf8(argument)) return add(kCommandLine, where + ": is no UTF-8 text, as decks are");
  const auto equals = argument.find('=');
  const std::string path = argument.substr(0, equals);
  const auto dot = path.find('.');
  if (equals == std::string::npos || equals == 0)
    return add(kCommandLine, where + ": an override is block.key=value");
  if (dot == std::string::npos) {
    std::vector<std::string> owners;
    for (const auto& b : deck_blocks())
      if (find_key(b.name + "." + path) != nullptr) owners.push_back(b.name + "." + path);
    add(kCommandLine,
        fmt::format(
            "{}: an override is block.key=value{}", where,
            owners.empty() ? "" : fmt::format("; did you mean {}?", fmt::join(owners, " or "))));
    return;
  }
  const toml::table table = override_value(argument.substr(equals + 1), find_key(path));
  read_key(path.substr(0, dot), path.substr(dot + 1), *table.get("v"), kCommandLine, where,
           overrides);
}

void Reader::finish(const std::vector<std::string>& more) {
  if (problems_.empty() && more.empty()) return;
  std::stable_sort(problems_.begin(), problems_.end(),
                   [](const PlacedProblem& a, const PlacedProblem& b) { return a.line < b.line; });
  std::vector<std::string> lines;
  for (const PlacedProblem& p : problems_) lines.push_back(p.text);
  lines.insert(lines.end(), more.begin(), more.end());
  const std::size_t count = lines.size();
  if (count > kMaximumProblems) {
    lines.resize(kMaximumProblems);
    lines.push_back(fmt::format("{}: ... and {} more", file_, count - kMaximumProblems));
  }
  throw Error(fmt::format("{}: {} problem{} in the deck (ballast --help deck lists every key)\n{}",
                          file_, count, count == 1 ? "" : "s", fmt::join(lines, "\n")));
}

/// Takes the shape from the folder of model.weights.  A deck that states the whole shape, as
/// effective decks do, or a preset, is complete without the folder.  When the shape stays unknown,
/// every key of the model joins `faulty`, so that one message says it.
std::vector<Problem> complete_from_weights(Deck& deck, std::set<Key>& faulty) {
  const std::string dir = deck.text("model.weights");
  if (dir.empty() || faulty.count("model.weights") != 0) return {};
  if (!std::filesystem::exists(dir) && deck.states_shape()) return {};
  try {
    return deck.apply_weights(read_huggingface_config(dir));
  } catch (const Error& error) {
    for (const std::string& key : block_keys("model")) faulty.insert("model." + key);
    return {{{"model.weights"}, fmt::format("model.weights: {}", error.what()), ""}};
  }
}

}  // namespace

Deck parse_deck(const std::string& text, const std::string& file,
                const std::vector<std::string>& overrides, const std::string& case_name,
                DeckNeeds needs) {
  Reader reader(file);
  reader.read_text(text);
  for (const auto& argument : overrides) reader.read_override(argument);

  Deck deck;
  deck.file = file;
  deck.case_name = case_name;
  const auto apply = [&](const std::vector<Setting>& settings) {
    // A preset of a case or of the command line means that model, not the hidden size of another
    // one that the deck states for itself.
    const auto preset = std::find_if(settings.begin(), settings.end(),
                                     [](const Setting& s) { return s.path == "model.preset"; });
    if (preset != settings.end() && preset->value != DeckValue(std::string("custom")))
      deck.drop_shape();
    for (const Setting& s : settings) deck.set(s.path, s.value, s.place, s.origin);
  };
  apply(reader.base);
  if (!case_name.empty()) {
    const auto chosen = std::find_if(reader.cases.begin(), reader.cases.end(),
                                     [&](const Case& c) { return c.name == case_name; });
    if (chosen != reader.cases.end()) {
      apply(chosen->settings);
    } else {
      std::vector<std::string> names;
      for (const Case& c : reader.cases) names.push_back(c.name);
      const std::string near = nearest_name(case_name, names);
      reader.add(0,
                 names.empty()
                     ? fmt::format("the deck has no [[case]] list, so no case \"{}\"",
                                   printable(case_name))
                     : fmt::format("no case \"{}\"{}; cases: {}", printable(case_name),
                                   near.empty() ? "" : fmt::format(" (did you mean \"{}\"?)", near),
                                   fmt::join(names, ", ")));
    }
  }
  apply(reader.overrides);
  // Rules about keys that could not be read at all would only confuse.
  std::vector<Problem> found;
  Config config = deck.config();
  if (reader.sound_syntax) {
    std::set<Key> faulty = reader.faulty;
    if (needs.weights) {
      found = complete_from_weights(deck, faulty);
      config = deck.config();
    }
    const auto more = problems(config, needs, faulty);
    found.insert(found.end(), more.begin(), more.end());
  }
  std::vector<std::string> lines;
  for (const Problem& problem : found) lines.push_back(placed(problem, config.from));
  reader.finish(lines);
  deck.apply_preset();
  return deck;
}

Config parse_config(const std::string& text, const std::string& file,
                    const std::vector<std::string>& overrides, const std::string& case_name,
                    DeckNeeds needs) {
  return parse_deck(text, file, overrides, case_name, needs).config();
}

std::vector<std::string> parse_deck_cases(const std::string& text, const std::string& file) {
  Reader reader(file);
  reader.read_text(text);
  reader.finish();
  std::vector<std::string> names;
  for (const Case& c : reader.cases) names.push_back(c.name);
  return names;
}

std::string read_deck_text(const std::string& path) {
  std::error_code error;
  require(!std::filesystem::is_directory(path, error), "deck {} is a folder, not a file", path);
  require(!std::filesystem::is_fifo(path, error), "deck {} is a FIFO, not a file", path);
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"),
                                                             std::fclose);
  require(file != nullptr, "deck {} cannot be read: {}", path, std::strerror(errno));
  std::string text(kMaximumBytes + 1, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), file.get()));
  require(std::ferror(file.get()) == 0, "deck {} cannot be read: {}", path, std::strerror(errno));
  require(text.size() <= kMaximumBytes, "deck {} is larger than {} bytes; is this the right file?",
          path, kMaximumBytes);
  refuse_deep_keys(text, path);
  return text;
}

Deck read_deck(const std::string& path, const std::vector<std::string>& overrides,
               const std::string& case_name, DeckNeeds needs) {
  return parse_deck(read_deck_text(path), path, overrides, case_name, needs);
}

std::vector<std::string> deck_cases(const std::string& path) {
  return parse_deck_cases(read_deck_text(path), path);
}

}  // namespace ballast

#include "io/trace/recorded_indexes.hpp"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "core/base/error.hpp"
#include "io/files/text_file.hpp"

namespace ballast {
namespace {

using Json = nlohmann::json;

template <class T>
void check_ascends(const std::vector<T>& list, const char* what) {
  require((list.empty() || list.front() >= 0) &&
              std::adjacent_find(list.begin(), list.end(), std::greater_equal<>()) == list.end(),
          "{} do not ascend", what);
}

RecordedHead head_of(const Json& line) {
  RecordedHead head;
  head.tokens = line.at("tokens").get<std::int64_t>();
  require(head.tokens > 0, "a sample of {} tokens", head.tokens);
  std::vector<std::int64_t> firsts;
  for (const Json& stored : line.at("stretches")) {
    RecordedHead::Stretch& stretch = head.stretches.emplace_back();
    stored.at(0).get_to(stretch.first);
    stored.at(1).get_to(stretch.local);
    stored.at(2).get_to(stretch.choice.slashes);
    stored.at(3).get_to(stretch.choice.columns);
    check_ascends(stretch.choice.slashes, "slashes");
    check_ascends(stretch.choice.columns, "columns");
    firsts.push_back(stretch.first);
  }
  check_ascends(firsts, "stretches");
  require(!firsts.empty() && firsts.front() == 0, "no stretch begins at the sample's start");
  return head;
}

struct Line {
  std::int64_t step = 0;
  int layer = 0, head = 0;
  RecordedHead recorded;
};
using Heads = std::set<std::pair<int, int>>;  ///< (layer, head)

/// Lines of one rank; what a run is still writing, or was when it died, is no line.
std::vector<Line> lines_of(const std::string& name) {
  std::vector<Line> lines;
  std::ifstream file(name);
  std::int64_t number = 0;
  for (std::string text; std::getline(file, text) && !file.eof();) {
    ++number;
    try {
      const Json line = Json::parse(text);
      const int layer = line.at("layer").get<int>(), head = line.at("head").get<int>();
      require(layer >= 0 && head >= 0, "layer {}, head {}", layer, head);
      lines.push_back({line.value("step", std::int64_t{0}), layer, head, head_of(line)});
    } catch (const std::exception& error) {
      fail("{}:{}: no recorded index: {}", name, number, error.what());
    }
  }
  // A branch that was given up stands before lines of the step that it began with, or earlier ones.
  std::vector<Line> kept;
  bool left_out = false;
  for (auto line = lines.rbegin(); line != lines.rend(); ++line) {
    const bool newer = !kept.empty() && (line->step > kept.back().step ||
                                         (left_out && line->step == kept.back().step));
    left_out = newer;
    if (!newer) kept.push_back(std::move(*line));
  }
  std::reverse(kept.begin(), kept.end());
  return kept;
}

}  // namespace

void append_indexes(const std::string& folder, int rank, std::span<const IndexRow> rows) {
  if (rows.empty()) return;
  std::filesystem::create_directory(folder);  // alone: a run folder that went is not made again
  const std::string name = fmt::format("{}/rank_{:05}.jsonl", folder, rank);
  drop_torn_line(name);
  std::ofstream file(name, std::ios::app);
  for (const IndexRow& row : rows) {
    Json stretches = Json::array();
    for (const IndexRow::Stretch& s : row.stretches)
      stretches.push_back({s.first, s.local, s.slashes, s.columns});
    file << Json{{"step", row.step + 1},
                 {"layer", row.layer},
                 {"head", row.head},
                 {"tokens", row.tokens},
                 {"stretches", stretches}}
                .dump()
         << '\n';
  }
  file.flush();
  require(file.good(), "{} cannot be written; is the disk full?", name);
}

RecordedIndexes read_indexes(const std::string& folder) {
  require(std::filesystem::is_directory(folder),
          "{}: no folder of indexes (trace.indexes_every writes one, RUN/indexes)", folder);
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    if (entry.path().extension() == ".jsonl") names.push_back(entry.path().string());
  std::sort(names.begin(), names.end());
  std::vector<Line> lines;
  for (const std::string& name : names)
    for (Line& line : lines_of(name)) lines.push_back(std::move(line));
  Heads all;
  std::set<std::int64_t, std::greater<>> steps;
  for (const Line& line : lines) all.emplace(line.layer, line.head), steps.insert(line.step);
  require(!all.empty(), "{}: no recorded index (rank_XXXXX.jsonl)", folder);
  for (const std::int64_t step : steps) {
    RecordedIndexes indexes;
    Heads heads;
    for (const Line& line : lines)
      if (line.step == step) {
        heads.emplace(line.layer, line.head);
        indexes.add(line.layer, line.head, line.recorded);
      }
    if (heads == all) return indexes;  // else a run is writing them, or was
  }
  fail("{}: no step of which every layer and head is recorded", folder);
}

}  // namespace ballast

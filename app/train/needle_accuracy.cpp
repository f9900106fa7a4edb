#include "app/train/needle_accuracy.hpp"

#include <algorithm>
#include <set>

#include "app/observe/text_table.hpp"

namespace ballast {

NeedleCount NeedleAccuracy::total() const {
  NeedleCount sum;
  for (std::size_t i = 0; i < cells.size(); ++i) sum += of_length(i);
  return sum;
}

NeedleCount NeedleAccuracy::of_length(std::size_t i) const {
  NeedleCount sum;
  for (const NeedleCount& cell : cells.at(i)) sum += cell;
  return sum;
}

NeedleCount NeedleAccuracy::of_depth(std::size_t d) const {
  NeedleCount sum;
  for (const auto& row : cells) sum += row.at(d);
  return sum;
}

StepRow NeedleAccuracy::scalars() const {
  StepRow row;
  const auto put = [&](const std::string& name, const NeedleCount& count) {
    if (count.questions > 0) row[name] = count.accuracy();
  };
  put("needle_accuracy", total());
  for (std::size_t d = 0; d < static_cast<std::size_t>(depths); ++d)
    put(fmt::format("needle_accuracy.depth.{}", d), of_depth(d));
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    put(fmt::format("needle_accuracy.length.{}", lengths[i]), of_length(i));
    for (std::size_t d = 0; d < static_cast<std::size_t>(depths); ++d)
      put(fmt::format("needle_accuracy.length.{}.depth.{}", lengths[i], d), cells[i][d]);
  }
  return row;
}

nlohmann::ordered_json NeedleAccuracy::json() const {
  using Json = nlohmann::ordered_json;
  const auto counted = [](Json json, const NeedleCount& count) {
    json["accuracy"] = count.accuracy();
    json["questions"] = count.questions;
    return json;
  };
  const auto part = [&](std::size_t d) {
    return Json{{"depth_begin", static_cast<double>(d) / static_cast<double>(depths)},
                {"depth_end", static_cast<double>(d + 1) / static_cast<double>(depths)}};
  };
  Json by_length = Json::array(), by_depth = Json::array(), all = Json::array();
  for (std::size_t i = 0; i < lengths.size(); ++i)
    by_length.push_back(counted({{"length", lengths[i]}}, of_length(i)));
  for (std::size_t d = 0; d < static_cast<std::size_t>(depths); ++d)
    by_depth.push_back(counted(part(d), of_depth(d)));
  for (std::size_t i = 0; i < lengths.size(); ++i)
    for (std::size_t d = 0; d < static_cast<std::size_t>(depths); ++d) {
      Json cell{{"length", lengths[i]}};
      cell.update(part(d));
      all.push_back(counted(cell, cells[i][d]));
    }
  return {{"accuracy", total().accuracy()},
          {"questions", total().questions},
          {"by_length", by_length},
          {"by_depth", by_depth},
          {"cells", all}};
}

std::string NeedleAccuracy::table() const {
  std::vector<std::string> header{"length"};
  for (std::int64_t d = 0; d < depths; ++d)
    header.push_back(fmt::format("{:.0f}-{:.0f} %",
                                 100.0 * static_cast<double>(d) / static_cast<double>(depths),
                                 100.0 * static_cast<double>(d + 1) / static_cast<double>(depths)));
  header.insert(header.end(), {"all", "questions"});
  TextTable table(header);
  const auto accuracy = [](const NeedleCount& count) {
    return count.questions > 0 ? fmt::format("{:.4f}", count.accuracy()) : std::string("-");
  };
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    std::vector<std::string> row{fmt::to_string(lengths[i])};
    for (const NeedleCount& cell : cells[i]) row.push_back(accuracy(cell));
    row.insert(row.end(), {accuracy(of_length(i)), fmt::to_string(of_length(i).questions)});
    table.row(row);
  }
  std::vector<std::string> last{"all"};
  for (std::size_t d = 0; d < static_cast<std::size_t>(depths); ++d)
    last.push_back(accuracy(of_depth(d)));
  last.insert(last.end(), {accuracy(total()), fmt::to_string(total().questions)});
  table.row(last);
  return table.text();
}

NeedleJudge::NeedleJudge(const Dataset& dataset, const std::vector<std::int64_t>& samples) {
  for (const std::int64_t sample : samples) {
    const auto list = dataset.questions(sample);
    if (list.empty()) continue;
    of_sample_[sample] = {questions_.size(), questions_.size() + list.size()};
    for (const NeedleQuestion& question : list)
      questions_.push_back({question, dataset.length(sample)});
  }
  right_tokens_.resize(questions_.size());
}

void NeedleJudge::add(const MicroBatch& micro_batch, const LocalBatch& batch,
                      const StageOutput& output) {
  if (!output.correct.defined()) return;
  const Tensor correct = output.correct.to(host_device()),
               positions = batch.positions.to(host_device());
  for (std::int64_t t = 0; t < batch.size(); ++t) {
    if (correct.data<std::uint8_t>()[t] == 0) continue;
    const auto found = of_sample_.find(
        micro_batch.segments
            .at(static_cast<std::size_t>(batch.segment[static_cast<std::size_t>(t)]))
            .sample);
    if (found == of_sample_.end()) continue;
    // The last of the sample's questions that begins at or before this token.
    const auto begin = questions_.begin() + static_cast<std::ptrdiff_t>(found->second.first),
               end = questions_.begin() + static_cast<std::ptrdiff_t>(found->second.second);
    const std::int64_t position = positions.data<std::int32_t>()[t];
    auto at = std::upper_bound(begin, end, position,
                               [](std::int64_t p, const Asked& a) { return p < a.question.first; });
    if (at == begin || position >= (--at)->question.last) continue;
    right_tokens_[static_cast<std::size_t>(at - questions_.begin())] += 1;
  }
}

NeedleAccuracy NeedleJudge::result(const Communicator& world, std::int64_t depths) const {
  NeedleAccuracy found;
  found.depths = depths;
  if (questions_.empty()) return found;
  Tensor right = Tensor::empty({static_cast<std::int64_t>(right_tokens_.size())}, DType::f64,
                               host_device(), MemoryCategory::workspace);
  std::copy(right_tokens_.begin(), right_tokens_.end(), right.data<double>());
  world.all_reduce(right);
  std::set<std::int64_t> lengths;
  for (const Asked& asked : questions_) lengths.insert(asked.length);
  found.lengths.assign(lengths.begin(), lengths.end());
  found.cells.assign(lengths.size(), std::vector<NeedleCount>(static_cast<std::size_t>(depths)));
  for (std::size_t q = 0; q < questions_.size(); ++q) {
    const Asked& asked = questions_[q];
    const auto row = static_cast<std::size_t>(
        std::lower_bound(found.lengths.begin(), found.lengths.end(), asked.length) -
        found.lengths.begin());
    const auto part = std::min(
        depths - 1, static_cast<std::int64_t>(asked.question.depth * static_cast<double>(depths)));
    found.cells[row][static_cast<std::size_t>(part)] +=
        {1,
         right.data<double>()[q] == static_cast<double>(asked.question.last - asked.question.first)
             ? 1
             : 0};
  }
  return found;
}

}  // namespace ballast

#include "io/checkpoint/checkpoint_layout.hpp"

#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <numeric>
#include <set>
#include <sstream>
#include <tuple>

#include "parallel/comm/waits.hpp"

namespace ballast {

namespace {

std::int64_t product(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

/// Names, fields that are lacking and shapes as text, a parameter a line; tied copies are left out,
/// since the parameter itself is in the file.
std::string table_text(const CheckpointShard& shard) {
  std::string text;
  std::int64_t at = 0;
  for (const Parameter& p : *shard.table) {
    std::string lacking;
    for (const auto& [field, first] : shard.field_begin)
      if (at < first) lacking += "," + field;
    at += p.numel();
    if (!p.tied_copy)
      text += fmt::format("{} {} {}\n", p.name, lacking.empty() ? "," : lacking,
                          fmt::join(p.shape, " "));
  }
  return text;
}

std::string fields_text(const CheckpointShard& shard) {
  std::string text;
  for (const auto& [field, tensor] : shard.fields)
    text += fmt::format("{} {}\n", field, static_cast<int>(tensor.dtype()));
  return text;
}

/// What one rank says of its shard.
struct Offer {
  std::uint64_t table_hash = 0;
  std::int64_t numel = 0;
  std::vector<std::pair<std::int64_t, std::int64_t>> runs;
  std::string fields;
};

Offer parse_offer(const std::string& text) {
  Offer offer;
  std::istringstream in(text);
  std::size_t runs = 0;
  in >> offer.table_hash >> offer.numel >> runs;
  offer.runs.resize(runs);
  for (auto& [begin, end] : offer.runs) in >> begin >> end;
  in.get();
  offer.fields.assign(std::istreambuf_iterator<char>(in), {});
  return offer;
}

/// What every rank says of its shard, on every rank.  Collective.
std::vector<Offer> gather_offers(const Communicator& world, const CheckpointShard& shard) {
  const std::string table = table_text(shard);
  std::int64_t numel = 0;
  for (const Parameter& p : *shard.table) numel += p.numel();
  const std::uint64_t hash =
      XXH64(table.data(), table.size(), 0) ^ static_cast<std::uint64_t>(numel);
  std::string text = fmt::format("{} {} {}", hash, numel, shard.runs.size());
  for (const ShardRun& run : shard.runs) text += fmt::format(" {} {}", run.begin, run.end);
  text += "\n" + (shard.empty() ? std::string() : fields_text(shard));
  std::vector<Offer> offers;
  for (const std::string& offer : world.all_gather(text)) offers.push_back(parse_offer(offer));
  return offers;
}

/// A run that a rank offers.
struct OfferedRun {
  std::int64_t begin = 0, end = 0;
  std::size_t rank = 0, run = 0;
};
/// The runs of one table, by their first element; those of lower ranks first.
std::vector<OfferedRun> runs_of(const std::vector<Offer>& offers, std::uint64_t table) {
  std::vector<OfferedRun> runs;
  for (std::size_t r = 0; r < offers.size(); ++r)
    for (std::size_t i = 0; offers[r].table_hash == table && i < offers[r].runs.size(); ++i)
      runs.push_back({offers[r].runs[i].first, offers[r].runs[i].second, r, i});
  std::stable_sort(runs.begin(), runs.end(),
                   [](const OfferedRun& a, const OfferedRun& b) { return a.begin < b.begin; });
  return runs;
}

/// The shards of one table must cover it, each element once.
void check_cover(const std::vector<Offer>& offers, std::uint64_t table) {
  const auto holder = std::find_if(offers.begin(), offers.end(),
                                   [&](const Offer& o) { return o.table_hash == table; });
  std::int64_t covered = 0;
  for (const OfferedRun& run : runs_of(offers, table)) {
    require(run.begin == covered,
            "checkpoint shards: elements [{}, {}) are offered by {}; rank {} offers [{}, {})",
            std::min(covered, run.begin), std::max(covered, run.begin),
            run.begin > covered ? "no rank" : "two ranks", run.rank, run.begin, run.end);
    covered = run.end;
  }
  require(covered == holder->numel, "checkpoint shards: elements [{}, {}) are offered by no rank",
          covered, holder->numel);
}

}  // namespace

std::int64_t CheckpointDataset::numel() const { return product(shape); }

std::vector<ChecksumRange> checksum_ranges(const std::vector<CheckpointDataset>& datasets) {
  std::vector<ChecksumRange> ranges;
  for (std::size_t d = 0; d < datasets.size(); ++d) {
    const std::int64_t numel = datasets[d].numel();
    for (std::int64_t begin = 0; begin < numel; begin += kChecksumElements)
      ranges.push_back({d, begin, std::min(numel, begin + kChecksumElements)});
  }
  return ranges;
}

std::vector<std::size_t> first_ranges(const std::vector<CheckpointDataset>& datasets) {
  std::vector<std::size_t> first{0};
  for (const CheckpointDataset& d : datasets)
    first.push_back(first.back() + static_cast<std::size_t>((d.numel() + kChecksumElements - 1) /
                                                            kChecksumElements));
  return first;
}

const CheckpointDataset* find_dataset(const std::vector<CheckpointDataset>& datasets,
                                      const std::string& parameter, const std::string& field) {
  const auto at = std::lower_bound(datasets.begin(), datasets.end(), std::tie(parameter, field),
                                   [](const CheckpointDataset& d, const auto& wanted) {
                                     return std::tie(d.parameter, d.field) < wanted;
                                   });
  return at != datasets.end() && at->parameter == parameter && at->field == field ? &*at : nullptr;
}

std::pair<std::size_t, std::size_t> ranges_of_rank(const std::vector<CheckpointDataset>& datasets,
                                                   const std::vector<ChecksumRange>& ranges,
                                                   int rank, int size) {
  const auto bytes = [&](const ChecksumRange& r) {
    return static_cast<double>(r.end - r.begin) *
           static_cast<double>(size_of(datasets[r.dataset].type));
  };
  const double total =
      std::accumulate(ranges.begin(), ranges.end(), 0.0,
                      [&](double sum, const ChecksumRange& r) { return sum + bytes(r); });
  // A range belongs to the rank in whose share of the bytes it begins.
  std::size_t first = ranges.size(), last = ranges.size();
  double before = 0;
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    const double owner = std::floor(before * size / total);
    if (first == ranges.size() && owner >= rank) first = i;
    if (owner > rank) {
      last = i;
      break;
    }
    before += bytes(ranges[i]);
  }
  return {std::min(first, last), last};
}

std::int64_t CheckpointShard::skipped(const std::string& field) const {
  const std::int64_t first = first_of(field);
  std::int64_t places = 0;
  for (const ShardRun& run : runs)
    if (run.begin < first) places = run.at + std::min(first, run.end) - run.begin;
  return places;
}

void for_each_part(const CheckpointShard& shard,
                   const std::function<void(const ShardPart&)>& visit) {
  std::map<std::string, std::int64_t> skipped;
  for (const auto& [field, first] : shard.field_begin) skipped[field] = shard.skipped(field);
  std::int64_t offset = 0;
  std::size_t next = 0;  // runs before it end before the parameter
  for (const Parameter& parameter : *shard.table) {
    const std::int64_t stop = offset + parameter.numel();
    while (next < shard.runs.size() && shard.runs[next].end <= offset) ++next;
    for (std::size_t i = next; i < shard.runs.size() && shard.runs[i].begin < stop; ++i) {
      const ShardRun& run = shard.runs[i];
      const std::int64_t from = std::max(run.begin, offset), to = std::min(run.end, stop);
      for (const auto& [field, tensor] : shard.fields)
        if (shard.first_of(field) <= offset)
          visit({parameter, field, tensor, from - offset, to - from,
                 run.at + from - run.begin - skipped[field], from, i});
    }
    offset = stop;
  }
}

void check_shard(const CheckpointShard& shard) {
  require(shard.table != nullptr, "checkpoint shard: no parameter table");
  std::int64_t numel = 0;
  for (const Parameter& p : *shard.table) {
    require(!p.shape.empty() && p.numel() > 0 && p.name.find('/') == std::string::npos &&
                !p.name.empty() && p.name != ".",
            "checkpoint shard: parameter \"{}\" of shape {} cannot be stored", p.name,
            to_string(p.shape));
    numel += p.numel();
  }
  std::int64_t end = 0, places = 0;
  for (const ShardRun& run : shard.runs) {
    require(end <= run.begin && run.begin < run.end && run.end <= numel && places <= run.at,
            "checkpoint shard: elements [{}, {}) of {} at place {}", run.begin, run.end, numel,
            run.at);
    end = run.end, places = run.at + run.count();
  }
  if (shard.empty()) return;
  require(!shard.fields.empty(), "checkpoint shard: elements [{}, {}) without fields",
          shard.runs.front().begin, end);
  for (const auto& [field, tensor] : shard.fields) {
    require(tensor.defined() && tensor.numel() >= shard.places_of(field) && tensor.contiguous(),
            "checkpoint shard: field {} has shape {}, not {} elements in a row", field,
            to_string(tensor.shape()), shard.places_of(field));
    require(tensor.dtype() == DType::f32 || tensor.dtype() == DType::f64 ||
                tensor.dtype() == DType::bf16,
            "checkpoint shard: field {} of {}", field, name(tensor.dtype()));
  }
}

CountedPart counted_part(const Communicator& world, const CheckpointShard& shard) {
  const std::vector<Offer> offers = gather_offers(world, shard);
  CountedPart part;
  part.runs.resize(shard.runs.size());
  part.complete = true;
  std::set<std::uint64_t> tables;
  for (const Offer& holder : offers) {
    if (!tables.insert(holder.table_hash).second) continue;  // a table that an earlier rank has
    std::int64_t covered = 0;
    for (const OfferedRun& run : runs_of(offers, holder.table_hash)) {
      part.complete = part.complete && run.begin <= covered;
      if (run.rank == static_cast<std::size_t>(world.rank()))
        part.runs[run.run] = {std::min(run.end, std::max(covered, run.begin)), run.end};
      covered = std::max(covered, run.end);
    }
    part.complete = part.complete && covered == holder.numel;
  }
  return part;
}

std::vector<CheckpointDataset> agree_layout(const Communicator& world,
                                            const CheckpointShard& shard) {
  together(world, [&] { check_shard(shard); });
  const std::string table = table_text(shard);
  const std::vector<Offer> offers = gather_offers(world, shard);
  const std::uint64_t hash = offers[static_cast<std::size_t>(world.rank())].table_hash;
  // Ranks with equal tables (all of them, or those of a pipeline stage) let the lowest one send it.
  const auto first_with = [&](std::uint64_t h) {
    return std::find_if(offers.begin(), offers.end(),
                        [&](const Offer& o) { return o.table_hash == h; }) -
           offers.begin();
  };
  const auto tables = world.all_gather(first_with(hash) == world.rank() ? table : std::string());

  std::vector<CheckpointDataset> datasets;
  together(world, [&] {
    const auto filled =
        std::find_if(offers.begin(), offers.end(), [](const Offer& o) { return !o.runs.empty(); });
    require(filled != offers.end(), "checkpoint shards: every rank's shard is empty");
    struct Described {
      Shape shape;
      std::string lacking;  // ",field,field"
    };
    std::map<std::string, Described> described;
    for (std::size_t r = 0; r < offers.size(); ++r) {
      require(offers[r].runs.empty() || offers[r].fields == filled->fields,
              "checkpoint shards: rank {} offers other fields than rank {}", r,
              filled - offers.begin());
      if (first_with(offers[r].table_hash) != static_cast<std::ptrdiff_t>(r)) continue;
      check_cover(offers, offers[r].table_hash);
      std::istringstream lines(tables[r]);
      for (std::string line; std::getline(lines, line);) {
        std::istringstream words(line);
        std::string name, lacking;
        words >> name >> lacking;
        Shape shape(std::istream_iterator<std::int64_t>(words), {});
        require(described.emplace(name, Described{shape, lacking + ","}).second,
                "checkpoint shards: parameter {} is in two tables", name);
      }
    }
    for (const auto& [name, it] : described) {
      std::istringstream lines(filled->fields);
      std::string field;
      for (int type = 0; lines >> field >> type;)
        if (it.lacking.find("," + field + ",") == std::string::npos)
          datasets.push_back({name, field, it.shape, static_cast<DType>(type), 0});
    }
  });
  return datasets;
}

}  // namespace ballast

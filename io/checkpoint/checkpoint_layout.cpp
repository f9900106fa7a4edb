#include "io/checkpoint/checkpoint_layout.hpp"

#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <numeric>
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
  std::int64_t begin = 0, end = 0, numel = 0;
  std::string fields;
};

Offer parse_offer(const std::string& text) {
  Offer offer;
  std::istringstream in(text);
  in >> offer.table_hash >> offer.begin >> offer.end >> offer.numel;
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
  const std::string fields = shard.begin < shard.end ? fields_text(shard) : "";
  std::vector<Offer> offers;
  for (const std::string& text : world.all_gather(
           fmt::format("{} {} {} {}\n{}", hash, shard.begin, shard.end, numel, fields)))
    offers.push_back(parse_offer(text));
  return offers;
}

/// The shards of one table must cover it, each element once.
void check_cover(const std::vector<Offer>& offers, std::uint64_t table) {
  std::vector<std::size_t> ranks;
  for (std::size_t r = 0; r < offers.size(); ++r) {
    if (offers[r].table_hash == table && offers[r].begin < offers[r].end) ranks.push_back(r);
  }
  std::sort(ranks.begin(), ranks.end(),
            [&](std::size_t a, std::size_t b) { return offers[a].begin < offers[b].begin; });
  const auto holder = std::find_if(offers.begin(), offers.end(),
                                   [&](const Offer& o) { return o.table_hash == table; });
  std::int64_t covered = 0;
  for (std::size_t r : ranks) {
    require(offers[r].begin == covered,
            "checkpoint shards: elements [{}, {}) are offered by {}; rank {} offers [{}, {})",
            std::min(covered, offers[r].begin), std::max(covered, offers[r].begin),
            offers[r].begin > covered ? "no rank" : "two ranks", r, offers[r].begin, offers[r].end);
    covered = offers[r].end;
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

void for_each_part(const CheckpointShard& shard,
                   const std::function<void(const ShardPart&)>& visit) {
  std::int64_t offset = 0;
  for (const Parameter& parameter : *shard.table) {
    const std::int64_t from = std::max(shard.begin, offset),
                       to = std::min(shard.end, offset + parameter.numel());
    for (const auto& [field, tensor] : shard.fields) {
      const std::int64_t first = shard.first_of(field);
      if (from < to && first <= offset)
        visit({parameter, field, tensor, from - offset, to - from,
               from - std::max(shard.begin, first), from});
    }
    offset += parameter.numel();
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
  require(0 <= shard.begin && shard.begin <= shard.end && shard.end <= numel,
          "checkpoint shard: elements [{}, {}) of {}", shard.begin, shard.end, numel);
  if (shard.begin == shard.end) return;
  require(!shard.fields.empty(), "checkpoint shard: elements [{}, {}) without fields", shard.begin,
          shard.end);
  for (const auto& [field, tensor] : shard.fields) {
    require(tensor.defined() && tensor.numel() == shard.elements_of(field) && tensor.contiguous(),
            "checkpoint shard: field {} has shape {}, not {} elements in a row", field,
            to_string(tensor.shape()), shard.elements_of(field));
    require(tensor.dtype() == DType::f32 || tensor.dtype() == DType::f64 ||
                tensor.dtype() == DType::bf16,
            "checkpoint shard: field {} of {}", field, name(tensor.dtype()));
  }
}

CountedPart counted_part(const Communicator& world, const CheckpointShard& shard) {
  const std::vector<Offer> offers = gather_offers(world, shard);
  const auto rank = static_cast<std::size_t>(world.rank());
  CountedPart part{shard.begin, shard.begin, true};
  for (std::size_t holder = 0; holder < offers.size(); ++holder) {
    const std::uint64_t table = offers[holder].table_hash;
    const auto same = [&](const Offer& o) { return o.table_hash == table; };
    if (std::find_if(offers.begin(), offers.end(), same) - offers.begin() !=
        static_cast<std::ptrdiff_t>(holder))
      continue;  // a table that an earlier rank has
    std::vector<std::size_t> ranks;
    for (std::size_t r = 0; r < offers.size(); ++r)
      if (same(offers[r])) ranks.push_back(r);
    std::stable_sort(ranks.begin(), ranks.end(), [&](std::size_t a, std::size_t b) {
      return offers[a].begin < offers[b].begin;
    });
    std::int64_t covered = 0;
    for (std::size_t r : ranks) {
      part.complete =
          part.complete && (offers[r].begin <= covered || offers[r].begin == offers[r].end);
      const std::int64_t begin = std::max(covered, offers[r].begin);
      if (r == rank && begin < offers[r].end) part = {begin, offers[r].end, part.complete};
      covered = std::max(covered, offers[r].end);
    }
    part.complete = part.complete && covered == offers[holder].numel;
  }
  return part;
}

std::vector<CheckpointDataset> agree_layout(const Communicator& world,
                                            const CheckpointShard& shard) {
  on_all_ranks(world, [&] { check_shard(shard); });
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
  on_all_ranks(world, [&] {
    const auto filled =
        std::find_if(offers.begin(), offers.end(), [](const Offer& o) { return o.begin < o.end; });
    require(filled != offers.end(), "checkpoint shards: every rank's shard is empty");
    struct Described {
      Shape shape;
      std::string lacking;  // ",field,field"
    };
    std::map<std::string, Described> described;
    for (std::size_t r = 0; r < offers.size(); ++r) {
      require(offers[r].begin == offers[r].end || offers[r].fields == filled->fields,
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

void on_all_ranks(const Communicator& world, const std::function<void()>& work) {
  std::string problem;
  try {
    work();
  } catch (const std::exception& error) {
    problem = *error.what() ? error.what() : "unknown error";
  }
  check_all(world, problem.empty(), problem);
}

}  // namespace ballast

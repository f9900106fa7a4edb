#include "io/checkpoint/shared_pages.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/base/error.hpp"
#include "io/checkpoint/checkpoint_envelope.hpp"
#include "parallel/comm/waits.hpp"

namespace ballast {
namespace {

constexpr std::uint64_t kPage = kCheckpointPage;
std::uint64_t page_of(std::uint64_t offset) { return offset / kPage * kPage; }

/// Bytes [begin, end) of a tensor, wherever it lies.
std::vector<std::byte> host_bytes(const Tensor& tensor, std::uint64_t begin, std::uint64_t end) {
  std::vector<std::byte> bytes(end - begin);
  const auto* from = static_cast<const std::byte*>(tensor.raw()) + begin;
  if (tensor.space() == Space::host) {
    std::memcpy(bytes.data(), from, bytes.size());
  } else {
    Device& device = device_of(tensor.space());
    device.copy(bytes.data(), Space::host, from, tensor.space(), bytes.size());
    device.synchronize();
  }
  return bytes;
}

}  // namespace

std::pair<std::uint64_t, std::uint64_t> SharedPages::own_part(std::uint64_t begin,
                                                              std::uint64_t end) const {
  for (const Run& head : heads_)
    if (head.offset <= begin && begin < head.end()) begin = std::min(end, head.end());
  for (const Run& page : pages_)
    if (begin < page.end() && page.offset < end) end = std::max(begin, page.offset);
  return {begin, end};
}

void SharedPages::write(const RawFile& file) const {
  for (const Run& page : pages_) file.write(page.offset, page.bytes.data(), page.bytes.size());
}

SharedPages share_pages(const Communicator& world, const std::vector<CheckpointDataset>& datasets,
                        const CheckpointShard& shard) {
  SharedPages shared;
  std::vector<std::uint64_t> limits;  // of each page: where the page or its dataset ends
  for_each_part(shard, [&](const ShardPart& part) {
    if (part.parameter.tied_copy) return;
    const CheckpointDataset& dataset = *find_dataset(datasets, part.parameter.name, part.field);
    const std::uint64_t width = size_of(dataset.type), begin = dataset.offset + part.first * width,
                        end = begin + part.count * width, stop = dataset.offset + dataset.bytes(),
                        place = part.at * width;
    const std::uint64_t head_end = std::min(end, page_of(begin + kPage - 1));
    if (begin < head_end)
      shared.heads_.push_back({begin, host_bytes(part.tensor, place, place + head_end - begin)});
    const std::uint64_t tail = std::max(page_of(end), head_end);
    if (end < stop && tail < end && tail % kPage == 0) {
      shared.pages_.push_back(
          {tail, host_bytes(part.tensor, place + tail - begin, place + end - begin)});
      limits.push_back(std::min(stop, tail + kPage));
    }
  });
  std::string text;
  for (const SharedPages::Run& head : shared.heads_) {
    const std::uint64_t words[2] = {head.offset, head.bytes.size()};
    text.append(reinterpret_cast<const char*>(words), sizeof words);
    text.append(reinterpret_cast<const char*>(head.bytes.data()), head.bytes.size());
  }
  std::vector<SharedPages::Run> runs;
  for (const std::string& given : world.all_gather(text))
    for (std::size_t i = 0; i < given.size();) {
      std::uint64_t words[2];
      std::memcpy(words, given.data() + i, sizeof words);
      const auto* data = reinterpret_cast<const std::byte*>(given.data()) + i + sizeof words;
      runs.push_back({words[0], {data, data + words[1]}});
      i += sizeof words + words[1];
    }
  std::sort(runs.begin(), runs.end(),
            [](const auto& a, const auto& b) { return a.offset < b.offset; });
  together(world, [&] {
    for (std::size_t p = 0; p < shared.pages_.size(); ++p) {
      SharedPages::Run& page = shared.pages_[p];
      for (const SharedPages::Run& run : runs)
        if (run.offset == page.end() && page.end() < limits[p])
          page.bytes.insert(page.bytes.end(), run.bytes.begin(), run.bytes.end());
      require(page.end() == limits[p],
              "checkpoint page at byte {}: elements from byte {} on are missing", page.offset,
              page.end());
    }
  });
  return shared;
}

}  // namespace ballast

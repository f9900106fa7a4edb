#include "app/train/position_loss.hpp"

#include <bit>
#include <span>

#include "app/observe/text_table.hpp"

namespace ballast {
namespace {

std::int64_t begin_of(std::size_t c) { return c == 0 ? 0 : std::int64_t{1} << (c - 1); }
std::int64_t end_of(std::size_t c) { return std::int64_t{1} << c; }

double loss_at(const Tensor& losses, std::int64_t t) {
  return losses.dtype() == DType::f64 ? losses.data<double>()[t] : losses.data<float>()[t];
}

}  // namespace

void PositionLoss::add(const LocalBatch& batch, const StageOutput& output) {
  if (!output.token_loss.defined()) return;
  const Tensor losses = output.token_loss.to(host_device()),
               positions = batch.positions.to(host_device()),
               targets = batch.targets.to(host_device());
  for (std::int64_t t = 0; t < batch.size(); ++t) {
    if (targets.data<std::int32_t>()[t] < 0) continue;
    const auto c = static_cast<std::size_t>(
        std::bit_width(static_cast<std::uint32_t>(positions.data<std::int32_t>()[t])));
    sums_[c] += loss_at(losses, t);
    sums_[kClasses + c] += 1;
  }
}

void PositionLoss::reduce(const Communicator& world) { world.all_reduce(std::span<double>(sums_)); }

nlohmann::ordered_json PositionLoss::json() const {
  auto list = nlohmann::ordered_json::array();
  for (std::size_t c = 0; c < kClasses; ++c)
    if (const double tokens = sums_[kClasses + c]; tokens > 0)
      list.push_back({{"begin", begin_of(c)},
                      {"end", end_of(c)},
                      {"loss", sums_[c] / tokens},
                      {"tokens", static_cast<std::int64_t>(tokens)}});
  return list;
}

std::string PositionLoss::table() const {
  TextTable table({"position", "loss", "tokens"});
  for (std::size_t c = 0; c < kClasses; ++c)
    if (const double tokens = sums_[kClasses + c]; tokens > 0)
      table.row({fmt::format("{}..{}", begin_of(c), end_of(c) - 1),
                 fmt::format("{:.6f}", sums_[c] / tokens), fmt::format("{:.0f}", tokens)});
  return table.text();
}

}  // namespace ballast

#include "app/model_files.hpp"

#include <algorithm>
#include <filesystem>

#include "io/huggingface.hpp"
#include "io/safetensors.hpp"

namespace ballast {
namespace {

constexpr std::int64_t kPieceElements = std::int64_t{1} << 24;  // on the host at once

}  // namespace

void load_weights(Session& session, ShardedOptimizer& optimizer) {
  const std::string& folder = session.deck.text("model.weights");
  together(session.mesh.world, [&] {
    require(std::filesystem::is_directory(folder), "model.weights = \"{}\": no such folder; a run that goes on (-r) does not need it",
            folder);
    Tensor& master = optimizer.state().master;
    const std::int64_t first = std::min(optimizer.shard_begin(), session.parameters.numel());
    const std::int64_t last = std::min(optimizer.shard_end(), session.parameters.numel());
    for (std::int64_t at = first;; at += kPieceElements) {  // once at least, so that every rank sees the names and shapes
      const std::int64_t end = std::min(at + kPieceElements, last);
      Tensor piece = Tensor::empty({end - at}, master.dtype(), host_device(), MemoryCategory::workspace);
      read_huggingface_weights(folder, session.parameters.table(), at, end, piece);
      master.rows(at - optimizer.shard_begin(), end - optimizer.shard_begin()).copy_from(piece);
      session.device.synchronize();  // before the piece goes
      if (end == last) break;
    }
  });
  optimizer.values_from_master();
}

void dump_gradients(const std::string& file, Session& session, const ShardedOptimizer& optimizer) {
  // The buffer of the micro-batches' gradients is free until the next step; a shard that lies in it stays in its place.
  Tensor& all = session.parameters.gradients();
  if (optimizer.shard_gradient().numel() < all.numel()) session.mesh.replica.all_gather(optimizer.shard_gradient(), all);
  together(session.mesh.world, [&] {
    if (session.mesh.world.rank() != 0) return;
    std::vector<std::pair<std::string, Shape>> tensors;
    for (const Parameter& p : session.parameters.table()) tensors.emplace_back(p.name, p.shape);
    SafetensorsWriter writer(file, tensors, "F32");
    std::vector<float> values;
    for (std::int64_t at = 0; at < session.parameters.numel(); at += kPieceElements) {
      const std::int64_t end = std::min(at + kPieceElements, session.parameters.numel());
      const Tensor piece = all.rows(at, end).to(host_device());
      session.device.synchronize();
      dispatch_float(piece.dtype(), [&](auto t) {
        const auto* data = piece.data<decltype(t)>();
        values.assign(data, data + piece.numel());
      });
      writer.append(values);
    }
    writer.finish();
  });
}

}  // namespace ballast

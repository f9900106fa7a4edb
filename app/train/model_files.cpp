#include "app/train/model_files.hpp"

#include <xxhash.h>

#include <algorithm>
#include <filesystem>
#include <optional>

#include "core/base/random.hpp"
#include "io/model/huggingface.hpp"
#include "io/model/safetensors.hpp"
#include "kernels/ops/elementwise.hpp"

namespace ballast {
namespace {

constexpr std::int64_t kPieceElements = std::int64_t{1} << 24;  // on the host at once

}  // namespace

void load_base(Session& session) {
  const std::string& folder = session.config.model.weights;
  Parameters& parameters = session.parameters;
  if (parameters.frozen_numel() == 0 || folder.empty()) return;
  together(session.mesh.world, [&] {
    require(std::filesystem::is_directory(folder),
            "model.weights = \"{}\": no such folder; adapters need the weights that they were "
            "trained beside",
            folder);
    ModelShape plain = session.options.model;
    plain.lora = {};
    const auto table = parameter_table(
        plain, session.options.layer_begin);  // what is frozen of a stage is one range of it
    const DType type = parameters.dtype() == DType::f64 ? DType::f64 : DType::f32;
    std::vector<float> values;
    for (const Parameter& p : parameters.frozen_table()) {
      const std::int64_t first = parameters.offset(p.name);
      std::uint64_t print = stream_of(p.name.c_str());
      for (std::int64_t at = first; at < first + p.numel(); at += kPieceElements) {
        const std::int64_t end = std::min(at + kPieceElements, first + p.numel());
        Tensor piece = Tensor::empty({end - at}, type, host_device(), MemoryCategory::workspace);
        read_huggingface_weights(folder, table, session.stage.begin + at, session.stage.begin + end,
                                 piece);
        Tensor target = parameters.values().rows(at, end);
        if (target.dtype() == type)
          target.copy_from(piece);
        else
          copy_rows(piece.to(session.device), target);
        session.device.synchronize();  // before the piece goes
        // As fp32 in every precision, parameter by parameter: the same folder has the same
        // fingerprint on every mesh.
        dispatch_float(type, [&](auto t) {
          values.assign(piece.data<decltype(t)>(), piece.data<decltype(t)>() + piece.numel());
        });
        print = XXH64(values.data(), values.size() * sizeof(float), print);
      }
      if (!p.tied_copy) session.base_fingerprint += print;
    }
    parameters.values_changed();
  });
  const std::vector<std::string> stages =
      session.mesh.pp.all_gather(fmt::to_string(session.base_fingerprint));
  session.base_fingerprint = 0;
  for (const std::string& print : stages) session.base_fingerprint += std::stoull(print);
}

void load_weights(Session& session, ShardedOptimizer& optimizer) {
  const std::string& folder = session.config.model.weights;
  if (session.parameters.frozen_numel() > 0) return;
  together(session.mesh.world, [&] {
    require(std::filesystem::is_directory(folder),
            "model.weights = \"{}\": no such folder; a run that goes on (-r) does not need it",
            folder);
    Tensor& master = optimizer.state().master;
    const auto table = session.table();  // a stage is one range of it
    const std::int64_t first = std::min(optimizer.shard_begin(), session.parameters.numel());
    const std::int64_t last = std::min(optimizer.shard_end(), session.parameters.numel());
    for (std::int64_t at = first;;
         at += kPieceElements) {  // once at least, so that every rank sees the names and shapes
      const std::int64_t end = std::min(at + kPieceElements, last);
      Tensor piece =
          Tensor::empty({end - at}, master.dtype(), host_device(), MemoryCategory::workspace);
      read_huggingface_weights(folder, table, session.stage.begin + at, session.stage.begin + end,
                               piece);
      master.rows(at - optimizer.shard_begin(), end - optimizer.shard_begin()).copy_from(piece);
      session.device.synchronize();  // before the piece goes
      if (end == last) break;
    }
  });
  optimizer.values_from_master();
}

void dump_gradients(const std::string& file, Session& session, const ShardedOptimizer& optimizer) {
  // The buffer of the micro-batches' gradients is free until the next step; a shard that lies in it
  // stays in its place.
  Tensor& all = session.parameters.gradients();
  if (optimizer.shard_gradient().numel() < all.numel())
    session.mesh.replica.all_gather(optimizer.shard_gradient(), all);
  else if (optimizer.shard_gradient().raw() != all.raw())  // ZeRO 2 of one replica
    all.copy_from(optimizer.shard_gradient());
  const Mesh& mesh = session.mesh;
  const auto table = session.table();
  together(mesh.world, [&] {
    if (mesh.replica.rank() != 0) return;  // the others hold the same
    const bool writes = mesh.at.pp == 0;
    std::string
        problem;  // the writer takes in what the other stages send even when it cannot write
    const auto attempt = [&](const auto& work) {
      if (!writes || !problem.empty()) return;
      try {
        work();
      } catch (const std::exception& e) {
        problem = e.what();
      }
    };
    std::vector<std::pair<std::string, Shape>> tensors;
    std::vector<std::int64_t> elements(static_cast<std::size_t>(mesh.shape.pp), 0);  // by stage
    for (const Parameter& p : table) {
      if (p.tied_copy || !p.trainable) continue;  // a tied copy is the last of its stage
      tensors.emplace_back(p.name, p.shape);
      elements[static_cast<std::size_t>(p.stage)] += p.numel();
    }
    std::optional<SafetensorsWriter> writer;
    attempt([&] { writer.emplace(file, tensors, "F32"); });
    std::vector<float> values;
    for (int stage = 0; stage < mesh.shape.pp; ++stage) {
      const std::int64_t count = elements[static_cast<std::size_t>(stage)];
      for (std::int64_t at = 0; at < count; at += kPieceElements) {
        const std::int64_t end = std::min(at + kPieceElements, count);
        const bool mine = stage == mesh.at.pp;
        if (!mine && !writes) continue;
        const Tensor piece = mine ? all.rows(at, end).to(host_device())
                                  : Tensor::empty({end - at}, all.dtype(), host_device(),
                                                  MemoryCategory::communication);
        session.device.synchronize();
        if (mine != writes)
          mesh.pp.exchange(std::vector<Transfer>{{piece, writes ? stage : 0, !writes}}).complete();
        attempt([&] {
          dispatch_float(piece.dtype(), [&](auto t) {
            const auto* data = piece.data<decltype(t)>();
            values.assign(data, data + piece.numel());
          });
          writer->append(values);
        });
      }
    }
    attempt([&] { writer->finish(); });
    require(problem.empty(), "{}", problem);
  });
}

}  // namespace ballast

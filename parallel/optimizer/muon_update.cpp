#include "parallel/optimizer/muon_update.hpp"

#include <algorithm>
#include <vector>

namespace ballast {

MuonUpdate::MuonUpdate(const Parameters& parameters, const Communicator& replica, bool sharded,
                       std::int64_t begin, std::int64_t end, MuonOptions options)
    : replica_(replica),
      sharded_(sharded && replica.size() > 1),
      block_(end - begin),
      options_(options),
      work_(MuonWork::of(parameters.trainable_table())) {
  std::int64_t all = 0;
  for (const Parameter& p : parameters.trainable_table())
    if (muon_updates(p)) all += p.numel();
  require(all == work_.elements,
          "Muon: {} elements of matrices lie behind other parameters; order_for_muon() orders them",
          all - work_.elements);
  begin_ = std::min(begin, work_.elements);
  end_ = std::min(end, work_.elements);
  owner_.assign(work_.matrices.size(), replica_.rank());
  lent_place_.assign(work_.matrices.size(), -1);
  if (!sharded_) return;
  replica_.set_up(device_of(parameters.space()));  // a rank may exchange nothing
  owner_ = muon_shards(work_, block_, replica_.size(), options_.steps).owner;
  for (std::size_t i = 0; i < owner_.size(); ++i) {
    const MuonMatrix& m = work_.matrices[i];
    if (owner_[i] != replica_.rank() || (begin_ <= m.begin && m.end() <= end_)) continue;
    lent_place_[i] = lent_elements_;
    lent_elements_ += m.numel();
  }
}

MuonUpdate::Piece MuonUpdate::held(const MuonMatrix& m, int rank) const {
  if (!sharded_) return {m.begin, m.end()};
  const std::int64_t begin = std::max(m.begin, block_ * rank),
                     end = std::min(m.end(), block_ * (rank + 1));
  return {begin, std::max(begin, end)};
}

std::int64_t MuonUpdate::exchange(const Tensor& own, const Tensor& lent, bool back) const {
  const int me = replica_.rank();
  std::vector<Transfer> transfers;
  std::int64_t bytes = 0;
  const auto add = [&](const Tensor& tensor, int peer, bool sends) {
    transfers.push_back({tensor, peer, sends});
    if (sends) bytes += static_cast<std::int64_t>(tensor.bytes());
  };
  for (std::size_t i = 0; i < owner_.size(); ++i) {
    const MuonMatrix& m = work_.matrices[i];
    const Piece mine = held(m, me);
    if (owner_[i] != me) {
      if (mine.begin < mine.end)
        add(own.rows(mine.begin - begin_, mine.end - begin_), owner_[i], !back);
      continue;
    }
    if (lent_place_[i] < 0) continue;
    const std::int64_t shift = lent_place_[i] - m.begin;
    for (int r = 0; r < replica_.size(); ++r) {
      const Piece piece = held(m, r);
      if (piece.begin == piece.end) continue;
      Tensor there = lent.rows(piece.begin + shift, piece.end + shift);
      if (r != me) {
        add(there, r, back);
        continue;
      }
      Tensor here = own.rows(mine.begin - begin_, mine.end - begin_);
      back ? here.copy_from(there) : there.copy_from(here);
    }
  }
  replica_.exchange(transfers).complete();
  return bytes;
}

void MuonUpdate::apply(Tensor moment, Tensor gradient, Tensor master, Tensor values,
                       double gradient_scale, double learning_rate, Recorder* recorder) {
  Device& device = device_of(gradient.space());
  {
    Scope scope(recorder, EventKind::optimizer);
    muon_momentum(moment, gradient, gradient_scale, options_);
  }
  Tensor lent;
  if (sharded_) {
    lent = Tensor::empty({lent_elements_}, gradient.dtype(), device, MemoryCategory::communication);
    Scope scope(recorder, EventKind::gradient_reduce);
    scope.bytes = exchange(gradient, lent, false);
  }
  {
    Scope scope(recorder, EventKind::optimizer);
    Workspace workspace(device);  // for a moment: activations need the room in the step
    for (std::size_t i = 0; i < owner_.size(); ++i) {
      if (owner_[i] != replica_.rank()) continue;
      const MuonMatrix& m = work_.matrices[i];
      const std::int64_t at = lent_place_[i];
      Tensor matrix = (at >= 0 ? lent.rows(at, at + m.numel())
                               : gradient.rows(m.begin - begin_, m.end() - begin_))
                          .reshape({m.rows, m.columns});
      orthogonalise(matrix, options_.steps, workspace);
    }
  }
  if (sharded_) {
    Scope scope(recorder, EventKind::parameter_gather);
    scope.bytes = exchange(gradient, lent, true);
  }
  Scope scope(recorder, EventKind::optimizer);
  for (const MuonMatrix& m : work_.matrices) {
    const Piece mine = held(m, replica_.rank());
    if (mine.begin == mine.end) continue;
    const std::int64_t first = mine.begin - begin_, last = mine.end - begin_;
    Tensor weights = master.rows(first, last), rounded = values.rows(first, last);
    muon_update(weights, gradient.rows(first, last),
                learning_rate * muon_scale(options_, m.rows, m.columns),
                learning_rate * options_.weight_decay, rounded);
  }
}

}  // namespace ballast

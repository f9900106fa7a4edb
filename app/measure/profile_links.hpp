// Latency and bandwidth of the mesh's links, level by level.
#pragma once
#include <vector>

#include "core/base/device.hpp"
#include "core/predict/profile_table.hpp"
#include "parallel/comm/mesh.hpp"

namespace ballast {

/// Times one neighbour exchange (send to the next rank, receive from the one before) of each level
/// that has several ranks: inner and outer ring, pipeline stages (stage), data-parallel ranks (dp).
/// All ranks exchange at once; the slowest counts.  Latency and bandwidth are the line of least
/// relative squares through the medians of messages from 4 KiB to `largest_bytes`.  Collective.
std::vector<ProfileLink> measure_links(const Mesh& mesh, Device& device, std::int64_t repeats,
                                       std::int64_t largest_bytes);

/// The line t = latency + bytes / bandwidth nearest to the points, errors relative; latency at
/// least 0.
ProfileLink fit_link(const std::string& level, const std::vector<double>& bytes,
                     const std::vector<double>& seconds);

}  // namespace ballast

// What NcclGroup decides without a GPU: which ranks share one.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "parallel/comm/comm.hpp"

#ifdef BALLAST_HAVE_NCCL
#include "parallel/comm/nccl_group.hpp"

namespace ballast {
namespace {

class NcclGroupRanks : public ::testing::Test {
 protected:
  void TearDown() override {
    unsetenv("NCCL_HOSTID");
    unsetenv("NCCL_SOCKET_IFNAME");
  }
};

TEST_F(NcclGroupRanks, GpusOfTheirOwnAreNotShared) {
  const Communicator world = Communicator::world();
  const std::string gpu = "uuid-" + std::to_string(world.rank());
  EXPECT_EQ(NcclGroup::let_ranks_share_gpus(world, world.split_by_machine(), gpu), "");
  EXPECT_EQ(std::getenv("NCCL_HOSTID"), nullptr);
}

TEST_F(NcclGroupRanks, ThoseOfOneGpuAreHostsOfTheirOwn) {
  const Communicator world = Communicator::world();
  if (world.size() == 1) GTEST_SKIP() << "needs two ranks";
  // The last rank has a GPU of its own, all others share one.
  const bool last = world.rank() == world.size() - 1;
  const std::string said =
      NcclGroup::let_ranks_share_gpus(world, world.split_by_machine(), last ? "b" : "a");
  if (world.size() == 2) {
    EXPECT_EQ(said, "");
    return;
  }
  EXPECT_EQ(said.find(std::to_string(world.size()) + " ranks share 2 GPUs of "), 0u) << said;
  const std::string mine = std::getenv("NCCL_HOSTID");
  const std::vector<std::string> ids = world.all_gather(mine);
  for (std::size_t a = 0; a < ids.size(); ++a)
    for (std::size_t b = 0; b < a; ++b) EXPECT_NE(ids[a], ids[b]);
  EXPECT_STREQ(std::getenv("NCCL_SOCKET_IFNAME"), "lo");
}

}  // namespace
}  // namespace ballast
#endif

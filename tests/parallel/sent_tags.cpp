#include "tests/parallel/sent_tags.hpp"

#include <mpi.h>

namespace ballast::testing {
namespace {

std::vector<std::pair<int, int>>* g_list = nullptr;

}  // namespace

SentTags::SentTags() { g_list = &list_; }
SentTags::~SentTags() { g_list = nullptr; }

void note_sent(int destination, int tag) {
  if (g_list != nullptr) g_list->emplace_back(destination, tag);
}

}  // namespace ballast::testing

// Takes the place of the library's function in this program.
extern "C" int MPI_Isend(const void* data, int count, MPI_Datatype type, int destination, int tag,
                         MPI_Comm communicator, MPI_Request* request) {
  ballast::testing::note_sent(destination, tag);
  return PMPI_Isend(data, count, type, destination, tag, communicator, request);
}

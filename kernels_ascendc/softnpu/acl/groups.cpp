// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// See groups.h.
#include "groups.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <map>
#include <mutex>
#include <stdexcept>

#include "runtime.h"

namespace softnpu {
namespace {

std::mutex& guard() {
  static auto* mutex = new std::mutex;  // never destroyed: a stream's thread may outlive static objects
  return *mutex;
}
std::map<std::pair<std::string, uint32_t>, std::shared_ptr<Group>>& groups() {
  static auto* all = new std::map<std::pair<std::string, uint32_t>, std::shared_ptr<Group>>;
  return *all;
}

[[noreturn]] void cannot(const std::string& what, const std::string& file) {
  throw std::runtime_error("group: cannot " + what + " " + file + ": " + std::strerror(errno));
}

// But for what HCCL has sent, by the names that it gives: a transfer that is still queued may want it.
void remove_folder(const std::string& folder) {
  if (DIR* entries = opendir(folder.c_str())) {
    while (const dirent* entry = readdir(entries)) {
      const std::string file = entry->d_name;
      if (file[0] != '.' && file.find_first_not_of("0123456789_") != std::string::npos)
        unlink((folder + "/" + file).c_str());
    }
    closedir(entries);
  }
  rmdir(folder.c_str());
}

std::string rank_file(const std::string& folder, uint32_t rank) { return folder + "/rank" + std::to_string(rank); }
std::string left_file(const std::string& folder, uint32_t rank) { return folder + "/left" + std::to_string(rank); }

// Also where a child has been forked that still has the file open.
void unlock(int fd) {
  flock(fd, LOCK_UN);
  close(fd);
}

constexpr auto kPatience = 20'000'000;  // nanoseconds between two looks at who is still there

}  // namespace

Group::Group(std::string name, uint32_t size, uint32_t rank)
    : name(std::move(name)), folder("/dev/shm/" + this->name), size(size), rank(rank) {
  mkdir(folder.c_str(), 0700);  // every rank tries, one succeeds
  const std::string mine = rank_file(folder, rank), bell = folder + "/bell";
  lock_ = open(mine.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (lock_ < 0) cannot("open", mine);
  if (flock(lock_, LOCK_EX | LOCK_NB) != 0) {
    close(lock_);
    throw std::runtime_error("group " + this->name + ": there is a rank " + std::to_string(rank) + " already");
  }
  const int fd = open(bell.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0 || ftruncate(fd, sizeof(uint32_t)) != 0) cannot("open", bell);
  void* page = mmap(nullptr, sizeof(uint32_t), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (page == MAP_FAILED) cannot("map", bell);
  bell_ = static_cast<std::atomic<uint32_t>*>(page);
}

Group::~Group() { munmap(static_cast<void*>(bell_), sizeof(uint32_t)); }

std::string Group::file(uint32_t source, uint32_t target, const std::string& what) const {
  return folder + "/" + std::to_string(source) + "_" + std::to_string(target) + "_" + what;
}

void Group::ring() const {
  bell_->fetch_add(1);
  syscall(SYS_futex, bell_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Group::put(uint32_t target, const std::string& what, const void* data, size_t bytes) const {
  const std::string whole = file(rank, target, what), partial = whole + ".part";
  FILE* out = std::fopen(partial.c_str(), "wbe");
  const bool written = out != nullptr && std::fwrite(data, 1, bytes, out) == bytes;
  if (out == nullptr || std::fclose(out) != 0 || !written) cannot("write", partial);
  if (std::rename(partial.c_str(), whole.c_str()) != 0) cannot("write", whole);
  ring();
}

bool Group::has(const Message& message) const {
  return access(file(message.source, rank, message.what).c_str(), F_OK) == 0;
}

std::vector<char> Group::take(uint32_t source, const std::string& what) const {
  const std::string whole = file(source, rank, what);
  FILE* in = std::fopen(whole.c_str(), "rbe");
  if (in == nullptr) cannot("read", whole);
  struct stat status{};
  fstat(fileno(in), &status);
  std::vector<char> data(status.st_size);
  const bool read = std::fread(data.data(), 1, data.size(), in) == data.size();
  std::fclose(in);
  if (!read) cannot("read", whole);
  unlink(whole.c_str());
  return data;
}

// A rank that has not joined yet is not gone.
bool Group::gone(uint32_t other) const {
  if (access(left_file(folder, other).c_str(), F_OK) == 0) return true;
  const int fd = open(rank_file(folder, other).c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return false;
  const bool dead = flock(fd, LOCK_SH | LOCK_NB) == 0;
  unlock(fd);
  return dead;
}

size_t Group::wait(const std::string& why, const std::vector<std::vector<Message>>& sets) {
  struct Counted {
    std::atomic<int>& count;
    explicit Counted(std::atomic<int>& c) : count(c) { ++count; }
    ~Counted() { --count; }
  } counted(waiting_);
  const Waiting waiting;
  const auto complete = [&](const std::vector<Message>& set) {
    return std::all_of(set.begin(), set.end(), [&](const Message& message) { return has(message); });
  };
  // In this order: what was sent before the sender left is there when it has left.
  const auto hopeless = [&](const std::vector<Message>& set) {
    return std::any_of(set.begin(), set.end(),
                       [&](const Message& message) { return gone(message.source) && !has(message); });
  };
  const auto give_up = [&](const std::string& because) {
    throw std::runtime_error("group " + name + ", rank " + std::to_string(rank) + ": " + why + ": " + because);
  };
  for (;;) {
    const uint32_t heard = bell_->load();
    for (size_t i = 0; i < sets.size(); ++i)
      if (complete(sets[i])) return i;
    if (waiting.over()) give_up("the process or the stream ends");
    if (!settings().destroy_hangs) {
      if (left_) give_up("the group was destroyed while this was pending");
      if (std::all_of(sets.begin(), sets.end(), hopeless))
        give_up("those it comes from have left the group, or their processes ended");
    }
    const timespec patience{0, kPatience};
    syscall(SYS_futex, bell_, FUTEX_WAIT, heard, &patience, nullptr, 0);
  }
}

void Group::leave() {
  while (settings().destroy_hangs && waiting_ > 0 && !exiting()) usleep(1000);
  if (left_.exchange(true)) return;
  // One at a time, so that one of them is the last.
  const int folder_lock = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder_lock >= 0) flock(folder_lock, LOCK_EX);
  std::rename(rank_file(folder, rank).c_str(), left_file(folder, rank).c_str());
  unlock(lock_);
  ring();
  bool last = true;
  for (uint32_t other = 0; other < size; ++other) last &= gone(other);
  if (last) remove_folder(folder);
  if (folder_lock >= 0) unlock(folder_lock);
}

void Group::forsake() {
  left_ = true;
  waiting_ = 0;  // a child has none of the threads that wait: `leave` would look for their end for ever
  close(lock_);
}

namespace {

// A forked child would hold the locks of its parent, whose ranks would seem alive when it is dead.
void follow_forks() {
  pthread_atfork([] { guard().lock(); }, [] { guard().unlock(); },
                 [] {
                   for (const auto& [key, group] : groups())
                     if (!group->left()) group->forsake();
                   guard().unlock();
                 });
}

}  // namespace

std::shared_ptr<Group> join_group(const std::string& name, uint32_t size, uint32_t rank) {
  static std::once_flag once;
  std::call_once(once, follow_forks);
  if (rank >= size)
    throw std::runtime_error("group " + name + ": rank " + std::to_string(rank) + " of " + std::to_string(size));
  std::lock_guard<std::mutex> lock(guard());  // no fork between the lock and the list of whose it is
  auto group = std::make_shared<Group>(name, size, rank);
  groups()[{name, rank}] = group;
  return group;
}

std::shared_ptr<Group> find_group(const std::string& name, uint32_t rank) {
  std::lock_guard<std::mutex> lock(guard());
  const auto found = groups().find({name, rank});
  return found == groups().end() ? nullptr : found->second;
}

void leave_all_groups() {
  std::vector<std::shared_ptr<Group>> all;
  {
    std::lock_guard<std::mutex> lock(guard());
    for (const auto& [key, group] : groups()) all.push_back(group);
  }
  for (const auto& group : all) group->leave();
}

}  // namespace softnpu

SOFTNPU_API int softnpu_group_join(const char* name, uint32_t size, uint32_t rank) {
  try {
    softnpu::join_group(name, size, rank);
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "softnpu: %s\n", e.what());
    return -1;
  }
}
SOFTNPU_API void softnpu_set_destroy_hangs(int on) { softnpu::settings().destroy_hangs = on != 0; }
SOFTNPU_API int softnpu_group_leave(const char* name, uint32_t rank) {
  const auto group = softnpu::find_group(name, rank);
  if (group == nullptr) return -1;
  group->leave();
  return 0;
}
SOFTNPU_API int softnpu_group_waiting(const char* name, uint32_t rank) {
  const auto group = softnpu::find_group(name, rank);
  return group == nullptr ? -1 : group->waiting();
}

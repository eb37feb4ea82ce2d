// SPDX-License-Identifier: Apache-2.0
//
// PoolAllocator keeps freed objects of one type in a list per thread: make_shared without malloc once it is
// warm.
//   std::allocate_shared<Transfer>(PoolAllocator<Transfer>());
// A thread keeps at most kCached of them; what it frees beyond goes back to the system. Threads: any; an object
// may be freed by another thread than the one that made it.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

namespace weft::transfer {

template <class T>
class PoolAllocator {
 public:
  using value_type = T;
  PoolAllocator() = default;
  template <class U>
  PoolAllocator(const PoolAllocator<U>&) {}

  T* allocate(size_t count) {
    std::vector<void*>& cached = list().cached;
    if (count != 1 || cached.empty()) return static_cast<T*>(::operator new(count * sizeof(T)));
    void* place = cached.back();
    cached.pop_back();
    return static_cast<T*>(place);
  }
  void deallocate(T* place, size_t count) {
    List& mine = list();
    if (count != 1 || mine.is_gone || mine.cached.size() >= kCached) return ::operator delete(place);
    mine.cached.push_back(place);
  }
  template <class U>
  bool operator==(const PoolAllocator<U>&) const {
    return true;
  }

 private:
  static constexpr size_t kCached = 1024;
  struct List {
    std::vector<void*> cached;
    bool is_gone = false;  // the thread is ending
    ~List() {
      is_gone = true;
      for (void* place : cached) ::operator delete(place);
      cached.clear();
    }
  };
  static List& list() {
    thread_local List mine;
    return mine;
  }
};

}  // namespace weft::transfer

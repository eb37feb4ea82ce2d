// SPDX-License-Identifier: Apache-2.0
//
// Preloaded by `weft chaos`: shifts this process's CLOCK_REALTIME by weft_chaos_clock_shift_ns, as if somebody had set
// the clock. CLOCK_MONOTONIC stays, as it does then. Deadlines on the shifted clock are shifted back before the system
// sees them; one of more than 10^9 seconds is taken for one, as no machine has been up for so long.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/time.h>
#include <time.h>

long long weft_chaos_clock_shift_ns = 0;

enum { kNanos = 1000000000 };

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static struct timespec shifted(struct timespec time, long long by) {
  const long long nanos = time.tv_nsec + by % kNanos;
  time.tv_sec += by / kNanos + (nanos >= kNanos) - (nanos < 0);
  time.tv_nsec = nanos + (nanos < 0 ? kNanos : 0) - (nanos >= kNanos ? kNanos : 0);
  return time;
}

static struct timespec for_the_system(const struct timespec* deadline) {
  return deadline->tv_sec > kNanos ? shifted(*deadline, -weft_chaos_clock_shift_ns) : *deadline;
}

int clock_gettime(clockid_t clock, struct timespec* now) {
  static int (*real)(clockid_t, struct timespec*) = 0;
  if (!real) real = REAL(clock_gettime);
  const int failed = real(clock, now);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
    *now = shifted(*now, weft_chaos_clock_shift_ns);
  return failed;
}

int gettimeofday(struct timeval* restrict now, void* restrict zone) {
  struct timespec time;
  (void)zone;
  if (clock_gettime(CLOCK_REALTIME, &time)) return -1;
  now->tv_sec = time.tv_sec;
  now->tv_usec = time.tv_nsec / 1000;
  return 0;
}

time_t time(time_t* out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t* restrict condition, pthread_mutex_t* restrict mutex,
                           const struct timespec* restrict deadline) {
  const struct timespec until = for_the_system(deadline);
  return REAL(pthread_cond_timedwait)(condition, mutex, &until);
}

int sem_timedwait(sem_t* restrict semaphore, const struct timespec* restrict deadline) {
  const struct timespec until = for_the_system(deadline);
  return REAL(sem_timedwait)(semaphore, &until);
}

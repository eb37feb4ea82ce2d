/* SPDX-License-Identifier: Apache-2.0
 *
 * A program written for NCCL, on host memory: every call of compat/nccl, against results computed here.
 * Usage: nccl_ranks TEST RANK RANKS ID_FILE. Returns 0, or 1 after a line that says what differed.
 */
#include <nccl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static int rank, ranks;
static size_t shift; /* elements from an aligned address to a buffer */
static const char* id_file;

#define FAIL(...)                              \
  do {                                         \
    fprintf(stderr, "rank %d: ", rank);        \
    fprintf(stderr, __VA_ARGS__);              \
    fprintf(stderr, " (line %d)\n", __LINE__); \
    exit(1);                                   \
  } while (0)
#define OK(call)                                                                                        \
  do {                                                                                                  \
    ncclResult_t result_ = (call);                                                                      \
    if (result_ != ncclSuccess)                                                                         \
      FAIL("%s: %d, %s: %s", #call, (int)result_, ncclGetErrorString(result_), ncclGetLastError(NULL)); \
  } while (0)
#define MUST(condition)                               \
  do {                                                \
    if (!(condition)) FAIL("not so: %s", #condition); \
  } while (0)

static ncclComm_t join(void) {
  ncclUniqueId id;
  char written[512];
  snprintf(written, sizeof written, "%s.tmp", id_file);
  if (rank == 0) {
    OK(ncclGetUniqueId(&id));
    FILE* file = fopen(written, "wb");
    MUST(file && fwrite(&id, sizeof id, 1, file) == 1 && fclose(file) == 0);
    MUST(rename(written, id_file) == 0);
  } else {
    for (int tries = 0; access(id_file, R_OK) != 0; ++tries) {
      MUST(tries < 3000);
      usleep(10000);
    }
    FILE* file = fopen(id_file, "rb");
    MUST(file && fread(&id, sizeof id, 1, file) == 1);
    fclose(file);
  }
  ncclComm_t comm;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  if (rank % 2)
    OK(ncclCommInitRank(&comm, ranks, id, rank));
  else
    OK(ncclCommInitRankConfig(&comm, ranks, id, rank, &config));
  return comm;
}

/* ---- numbers: small integers, which every type holds exactly ---- */

static const ncclDataType_t kTypes[] = {ncclInt8,    ncclUint8,    ncclInt32,      ncclUint32,
                                        ncclInt64,   ncclUint64,   ncclFloat16,    ncclFloat32,
                                        ncclFloat64, ncclBfloat16, ncclFloat8e4m3, ncclFloat8e5m2};
static const size_t kBytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

/* Bits of a small float with `mantissa` bits and an exponent that is biased by `bias`; exact where it fits.
 */
static uint64_t small_float(double value, int mantissa, int bias) {
  if (value == 0) return 0;
  int exponent = 0;
  while (value >= 2) value /= 2, ++exponent;
  while (value < 1) value *= 2, --exponent;
  return ((uint64_t)(exponent + bias) << mantissa) | (uint64_t)((value - 1) * (double)(1 << mantissa));
}
static void put(void* buffer, size_t at, ncclDataType_t type, double value) {
  union {
    int64_t i;
    uint64_t u;
    float f;
    double d;
  } x;
  switch (type) {
    case ncclFloat16:
      x.u = small_float(value, 10, 15);
      break;
    case ncclBfloat16:
      x.u = small_float(value, 7, 127);
      break;
    case ncclFloat8e4m3:
      x.u = small_float(value, 3, 7);
      break;
    case ncclFloat8e5m2:
      x.u = small_float(value, 2, 15);
      break;
    case ncclFloat32:
      x.f = (float)value;
      break;
    case ncclFloat64:
      x.d = value;
      break;
    default:
      x.i = (int64_t)value;
  }
  memcpy((char*)buffer + at * kBytes[type], &x, kBytes[type]);
}
static int is(const void* buffer, size_t at, ncclDataType_t type, double value) {
  char wanted[8];
  put(wanted, 0, type, value);
  return memcmp((const char*)buffer + at * kBytes[type], wanted, kBytes[type]) == 0;
}
static double get(const void* buffer, size_t at, ncclDataType_t type) {
  const int mantissa = type == ncclFloat16 ? 10 : type == ncclBfloat16 ? 7 : type == ncclFloat8e4m3 ? 3 : 2;
  const int bias = type == ncclBfloat16 ? 127 : type == ncclFloat8e4m3 ? 7 : 15;
  uint64_t bits = 0;
  memcpy(&bits, (const char*)buffer + at * kBytes[type], kBytes[type]);
  float single;
  double whole;
  memcpy(&single, &bits, sizeof single);
  memcpy(&whole, &bits, sizeof whole);
  if (type == ncclFloat32) return single;
  if (type == ncclFloat64) return whole;
  double number = 1 + (double)(bits & ((1u << mantissa) - 1)) / (double)(1 << mantissa);
  for (int e = (int)(bits >> mantissa) - bias; e > 0; --e) number *= 2;
  for (int e = (int)(bits >> mantissa) - bias; e < 0; ++e) number /= 2;
  return number;
}
/* 1 or 2, so that sums, products and averages of up to 5 ranks stay exact in 8 bits or are known. */
static double value(int of_rank, size_t at) {
  return 1 + (double)((of_rank + at) % 2);
}
static void fill(void* buffer, size_t count, ncclDataType_t type, int of_rank) {
  for (size_t i = 0; i < count; ++i) put(buffer, i, type, value(of_rank, i));
}
enum { kFactor = 2 }; /* of operators that are made */
static double reduced(ncclRedOp_t op, size_t at) {
  double sum = 0, product = 1, most = 1, least = 2;
  for (int r = 0; r < ranks; ++r) {
    const double v = value(r, at);
    sum += v;
    product *= v;
    most = v > most ? v : most;
    least = v < least ? v : least;
  }
  return op == ncclSum    ? sum
         : op == ncclProd ? product
         : op == ncclMax  ? most
         : op == ncclMin  ? least
         : op == ncclAvg  ? sum / ranks
                          : kFactor * sum;
}
/* Whether there is the reduction of element `of`. Averages of 3 ranks are rounded, in a way that is the library's. */
static int has(const void* buffer, size_t at, ncclDataType_t type, ncclRedOp_t op, size_t of) {
  const double wanted = reduced(op, of);
  if (op != ncclAvg || type <= ncclUint64 || (ranks & (ranks - 1)) == 0) return is(buffer, at, type, wanted);
  const double error = get(buffer, at, type) - wanted;
  const double most = type == ncclFloat8e5m2   ? 0.25
                      : type == ncclFloat8e4m3 ? 0.13
                      : type == ncclBfloat16   ? 0.01
                      : type == ncclFloat16    ? 1e-3
                      : type == ncclFloat32    ? 1e-6
                                               : 1e-14;
  return error < most && -error < most;
}

static void reductions(ncclComm_t comm, size_t count, ncclDataType_t type, ncclRedOp_t op) {
  const size_t all = count * (size_t)ranks, bytes = kBytes[type];
  char *src = calloc(all + 1 + shift, bytes), *dst = calloc(all + 1 + shift, bytes);
  char* kept = calloc(all + 1, bytes);
  src += shift * bytes, dst += shift * bytes;
  fill(src, all, type, rank);
  memcpy(kept, src, all * bytes);
  dst[all * bytes] = 'x';
  OK(ncclAllReduce(src, dst, all, type, op, comm, NULL));
  for (size_t i = 0; i < all; ++i)
    if (!has(dst, i, type, op, i))
      FAIL("all reduce of %zu, type %d, op %d, at %zu", all, type, op, i);
  MUST(memcmp(src, kept, all * bytes) == 0 && dst[all * bytes] == 'x');
  memcpy(dst, src, all * bytes);
  OK(ncclAllReduce(dst, dst, all, type, op, comm, NULL));
  for (size_t i = 0; i < all; ++i) MUST(has(dst, i, type, op, i));
  memset(dst, 7, all * bytes);
  OK(ncclReduceScatter(src, dst, count, type, op, comm, NULL));
  for (size_t i = 0; i < count; ++i) MUST(has(dst, i, type, op, (size_t)rank * count + i));
  MUST(memcmp(src, kept, all * bytes) == 0);
  memcpy(dst, src, all * bytes);
  OK(ncclReduceScatter(dst, dst + (size_t)rank * count * bytes, count, type, op, comm, NULL));
  for (size_t i = 0; i < count; ++i)
    MUST(has(dst, (size_t)rank * count + i, type, op, (size_t)rank * count + i));
  for (int root = 0; root < ranks; root += ranks > 1 ? ranks - 1 : 1) {
    memset(dst, 7, all * bytes);
    OK(ncclReduce(src, rank == root ? dst : NULL, all, type, op, root, comm, NULL));
    MUST(memcmp(src, kept, all * bytes) == 0);
    if (rank == root)
      for (size_t i = 0; i < all; ++i) MUST(has(dst, i, type, op, i));
    memcpy(dst, src, all * bytes);
    OK(ncclReduce(dst, dst, all, type, op, root, comm, NULL));
    for (size_t i = 0; i < all && rank == root; ++i) MUST(has(dst, i, type, op, i));
    MUST(rank == root || memcmp(dst, kept, all * bytes) == 0);
  }
  free(src - shift * bytes), free(dst - shift * bytes), free(kept);
}

static void movements(ncclComm_t comm, size_t count, ncclDataType_t type) {
  const size_t all = count * (size_t)ranks, bytes = kBytes[type];
  char *src = calloc(all + 1 + shift, bytes), *dst = calloc(all + 1 + shift, bytes);
  src += shift * bytes, dst += shift * bytes;
  fill(src, all, type, rank);
  OK(ncclAllGather(src, dst, count, type, comm, NULL));
  for (int r = 0; r < ranks; ++r)
    for (size_t i = 0; i < count; ++i) MUST(is(dst, (size_t)r * count + i, type, value(r, i)));
  memset(dst, 7, all * bytes);
  memcpy(dst + (size_t)rank * count * bytes, src, count * bytes);
  OK(ncclAllGather(dst + (size_t)rank * count * bytes, dst, count, type, comm, NULL));
  for (int r = 0; r < ranks; ++r)
    for (size_t i = 0; i < count; ++i) MUST(is(dst, (size_t)r * count + i, type, value(r, i)));
  for (int form = 0; form < 2; ++form) {
    memset(dst, 7, all * bytes);
    OK((form ? ncclAllToAll : ncclAlltoAll)(src, dst, count, type, comm, NULL));
    for (int r = 0; r < ranks; ++r)
      for (size_t i = 0; i < count; ++i)
        MUST(is(dst, (size_t)r * count + i, type, value(r, (size_t)rank * count + i)));
  }
  for (int root = 0; root < ranks; ++root) {
    memset(dst, 7, all * bytes);
    OK(ncclBroadcast(rank == root ? src : NULL, dst, all, type, root, comm, NULL));
    for (size_t i = 0; i < all; ++i) MUST(is(dst, i, type, value(root, i)));
    memcpy(dst, src, all * bytes);
    OK(ncclBcast(dst, all, type, root, comm, NULL));
    for (size_t i = 0; i < all; ++i) MUST(is(dst, i, type, value(root, i)));
    memset(dst, 7, all * bytes);
    OK(ncclGather(src, rank == root ? dst : NULL, count, type, root, comm, NULL));
    if (rank == root)
      for (int r = 0; r < ranks; ++r)
        for (size_t i = 0; i < count; ++i) MUST(is(dst, (size_t)r * count + i, type, value(r, i)));
    memset(dst, 7, all * bytes);
    OK(ncclScatter(rank == root ? src : NULL, dst, count, type, root, comm, NULL));
    for (size_t i = 0; i < count; ++i) MUST(is(dst, i, type, value(root, (size_t)rank * count + i)));
    char* own = rank == root ? dst + (size_t)rank * count * bytes : src; /* in place at the root */
    memset(dst, 7, all * bytes);
    if (own != src) memcpy(own, src, count * bytes);
    OK(ncclGather(own, rank == root ? dst : NULL, count, type, root, comm, NULL));
    for (int r = 0; r < ranks && rank == root; ++r)
      for (size_t i = 0; i < count; ++i) MUST(is(dst, (size_t)r * count + i, type, value(r, i)));
    memcpy(dst, src, all * bytes);
    own = rank == root ? dst + (size_t)rank * count * bytes : dst;
    OK(ncclScatter(rank == root ? dst : NULL, own, count, type, root, comm, NULL));
    for (size_t i = 0; i < count; ++i) MUST(is(own, i, type, value(root, (size_t)rank * count + i)));
  }
  free(src - shift * bytes), free(dst - shift * bytes);
}

static void collectives(void) {
  ncclComm_t comm = join();
  const size_t counts[] = {1, 3, 1025, 50001};
  for (size_t t = 0; t < sizeof kTypes / sizeof kTypes[0]; ++t) {
    for (int op = ncclSum; op <= ncclAvg; ++op) reductions(comm, 45, kTypes[t], (ncclRedOp_t)op);
    for (int residence = ncclScalarDevice; residence <= ncclScalarHostImmediate; ++residence) {
      char factor[8] = {0};
      ncclRedOp_t op;
      put(factor, 0, kTypes[t], kFactor);
      OK(ncclRedOpCreatePreMulSum(&op, factor, kTypes[t], (ncclScalarResidence_t)residence, comm));
      reductions(comm, 45, kTypes[t], op);
      OK(ncclRedOpDestroy(op, comm));
    }
  }
  for (size_t t = 0; t < sizeof kTypes / sizeof kTypes[0]; ++t) movements(comm, 45, kTypes[t]);
  for (size_t c = 0; c < sizeof counts / sizeof counts[0]; ++c) {
    reductions(comm, counts[c], ncclFloat32, ncclSum);
    reductions(comm, counts[c], ncclFloat16, ncclMax);
    movements(comm, counts[c], ncclFloat32);
  }
  reductions(comm, 400000, ncclFloat32, ncclSum);
  for (shift = 1; shift < 4; shift += 2) {
    reductions(comm, 1025, ncclUint8, ncclSum);
    reductions(comm, 9001, ncclBfloat16, ncclMax);
    movements(comm, 9001, ncclUint8);
    movements(comm, 16384, ncclFloat32);
  }
  shift = 0;
  /* Zero elements: nothing happens, null pointers too. */
  OK(ncclAllReduce(NULL, NULL, 0, ncclFloat32, ncclSum, comm, NULL));
  OK(ncclAllGather(NULL, NULL, 0, ncclFloat32, comm, NULL));
  if (ranks > 1) OK(ncclSend(NULL, 0, ncclFloat32, (rank + 1) % ranks, comm, NULL));
  weftNcclCount_t rows[32];
  const int count = weftNcclCounts(rows, 32);
  int found = 0;
  for (int i = 0; i < count; ++i)
    if (!strcmp(rows[i].name, "ncclAllReduce")) found = rows[i].served > 10 && rows[i].forwarded == 0;
  MUST(found);
  OK(ncclCommFinalize(comm));
  OK(ncclCommDestroy(comm));
}

static void operators(void) {
  ncclComm_t comm = join();
  float in[5], out[5], third = 0.25f;
  int32_t whole[3], sum[3], factor = -3;
  uint16_t half = 0x4000, halves[2]; /* 2.0 */
  ncclRedOp_t op, integer, small;
  OK(ncclRedOpCreatePreMulSum(&op, &third, ncclFloat32, ncclScalarHostImmediate, comm));
  OK(ncclRedOpCreatePreMulSum(&integer, &factor, ncclInt32, ncclScalarDevice, comm));
  OK(ncclRedOpCreatePreMulSum(&small, &half, ncclFloat16, ncclScalarHostImmediate, comm));
  MUST(op >= ncclNumOps && integer != op);
  for (int i = 0; i < 5; ++i) in[i] = (float)(4 * rank + 8 * i);
  OK(ncclAllReduce(in, out, 5, ncclFloat32, op, comm, NULL));
  for (int i = 0; i < 5; ++i) MUST(out[i] == (float)(ranks * (ranks - 1) / 2 + 2 * i * ranks));
  for (int i = 0; i < 3; ++i) whole[i] = rank - i;
  OK(ncclReduce(whole, sum, 3, ncclInt32, integer, ranks - 1, comm, NULL));
  for (int i = 0; i < 3; ++i) {
    MUST(whole[i] == rank - i);
    if (rank == ranks - 1) MUST(sum[i] == -3 * (ranks * (ranks - 1) / 2 - ranks * i));
  }
  put(halves, 0, ncclFloat16, 1);
  put(halves, 1, ncclFloat16, 3);
  OK(ncclAllReduce(halves, halves, 2, ncclFloat16, small, comm, NULL));
  MUST(is(halves, 0, ncclFloat16, 2 * ranks) && is(halves, 1, ncclFloat16, 6 * ranks));
  MUST(ncclAllReduce(whole, sum, 3, ncclInt32, op, comm, NULL) == ncclInvalidArgument);
  OK(ncclRedOpDestroy(op, comm));
  MUST(ncclAllReduce(in, out, 5, ncclFloat32, op, comm, NULL) == ncclInvalidArgument);
  MUST(ncclRedOpDestroy(op, comm) == ncclInvalidArgument);
  for (int turn = 1; turn < 4; ++turn) { /* numbers are used again, scalars are not */
    const ncclRedOp_t before = op;
    third = (float)turn;
    OK(ncclRedOpCreatePreMulSum(&op, &third, ncclFloat32, ncclScalarHostImmediate, comm));
    MUST(op == before);
    OK(ncclAllReduce(in, out, 5, ncclFloat32, op, comm, NULL));
    for (int i = 0; i < 5; ++i) MUST(out[i] == turn * (4 * (float)(ranks * (ranks - 1) / 2) + 8 * i * ranks));
    OK(ncclRedOpDestroy(op, comm));
  }
  OK(ncclCommDestroy(comm));
}

/* One form of call after another, again and again with other buffers and numbers: what is kept of a call is its form's
 * alone. Two forms differ in one thing each: reduction, type, root, count, function. */
enum { kPlaces = 3, kMost = 900 };
static void repeat_collectives(ncclComm_t comm, int round, int32_t* src, int32_t* dst) {
  const ncclRedOp_t ops[] = {ncclSum, ncclMax};
  const size_t counts[] = {3, kMost / 9};
  const int scale = 1 + round % 5, root = round % ranks;
  for (int form = 0; form < 4; ++form) {
    const size_t count = counts[form % 2];
    const ncclRedOp_t op = ops[form / 2];
    for (size_t i = 0; i < kMost; ++i) src[i] = scale * (rank + 1) + (int)i, dst[i] = -1;
    const int most = scale * ranks, sum = scale * ranks * (ranks + 1) / 2;
    OK(ncclAllReduce(src, dst, count, ncclInt32, op, comm, NULL));
    for (int i = 0; i < (int)count; ++i) MUST(dst[i] == (op == ncclMax ? most + i : sum + ranks * i));
    OK(ncclReduce(src, dst, count, ncclInt32, op, root, comm, NULL));
    for (int i = 0; i < (int)count && rank == root; ++i)
      MUST(dst[i] == (op == ncclMax ? most + i : sum + ranks * i));
    OK(ncclBroadcast(src, dst, count, ncclInt32, root, comm, NULL));
    for (int i = 0; i < (int)count; ++i) MUST(dst[i] == scale * (root + 1) + i);
    OK(ncclAllGather(src, dst, count, ncclInt32, comm, NULL));
    for (int i = 0; i < (int)count * ranks; ++i)
      MUST(dst[i] == scale * (i / (int)count + 1) + i % (int)count);
    OK(ncclAlltoAll(src, dst, count, ncclInt32, comm, NULL));
    for (int i = 0; i < (int)count * ranks; ++i)
      MUST(dst[i] == scale * (i / (int)count + 1) + rank * (int)count + i % (int)count);
  }
  int32_t whole = scale,
          wholes = 0; /* two types of as many bytes; as floats, such integers would add up, too */
  OK(ncclAllReduce(&whole, &wholes, 1, ncclInt32, ncclSum, comm, NULL));
  MUST(wholes == scale * ranks);
  float one = (float)scale, total = 0;
  OK(ncclAllReduce(&one, &total, 1, ncclFloat32, ncclSum, comm, NULL));
  MUST(total == (float)(scale * ranks));
}

static void repeat_messages(ncclComm_t comm, int round, int32_t* src, int32_t* dst) {
  const int next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
  for (int form = 0; form < 3; ++form) { /* sizes and places differ, then come again */
    const size_t count = (size_t)(5 + 7 * form), at = (size_t)(form * 40 + round % 2);
    for (size_t i = 0; i < kMost; ++i) src[i] = rank * 1000 + round + (int)i, dst[i] = -1;
    OK(ncclGroupStart());
    for (int k = 0; k < 3; ++k) {
      OK(ncclSend(src + at + (size_t)k * 200, count, ncclInt32, next, comm, NULL));
      OK(ncclRecv(dst + at + (size_t)k * 200, count, ncclInt32, previous, comm, NULL));
    }
    OK(ncclGroupEnd());
    for (int k = 0; k < 3; ++k)
      for (int i = 0; i < (int)count; ++i) {
        const int place = (int)at + k * 200 + i;
        MUST(dst[place] == previous * 1000 + round + place);
      }
    const int apart = 20 + 30 * form; /* what goes out stays as it is, what comes in does not */
    OK(ncclGroupStart());
    for (int r = 0; r < ranks; ++r) {
      OK(ncclSend(src + rank, 5, ncclInt32, r, comm, NULL));
      OK(ncclRecv(dst + r * apart, 5, ncclInt32, r, comm, NULL));
    }
    OK(ncclGroupEnd());
    for (int r = 0; r < ranks; ++r)
      for (int i = 0; i < 5; ++i) MUST(dst[r * apart + i] == r * 1001 + round + i);
  }
}

/* A message to and from every other rank, twice alike from other memory, then with another place, size or order: places
 * are 40 apart, but in one form rank 1's; counts are 7, but in one form 6. Sends or receives lie in falling order. */
static void repeat_a_round(ncclComm_t comm, int round, int32_t* src, int32_t* dst) {
  for (int form = 0; form < 8; ++form) {
    const int moved = form / 2 == 1, shorter = form / 2 == 2, is_turned = form / 2 == 3;
    int32_t *out = src + (form % 2) * 3, *in = dst + (form % 2) * 5;
    const size_t count = shorter ? 6 : 7;
    for (size_t i = 0; i < kMost; ++i) src[i] = rank * 1000 + round + (int)i, dst[i] = -1;
#define OUT(r) (out + ((ranks - (r)) * 40 + (moved && (r) == 1 ? 11 : 0)))
#define IN(r) (in + ((r) * 40 + (moved && (r) == 1 ? 13 : 0)))
    OK(ncclGroupStart());
    for (int i = 0; i < ranks; ++i) {
      const int r = is_turned ? ranks - 1 - i : i;
      if (r == rank) continue;
      OK(ncclRecv(IN(r), count, ncclInt32, r, comm, NULL));
      OK(ncclSend(OUT(r), count, ncclInt32, r, comm, NULL));
    }
    OK(ncclGroupEnd());
    for (int r = 0; r < ranks; ++r) {
      if (r == rank) continue;
      const int first = (int)(OUT(rank) - src); /* there as here, only the moved place is of rank 1 */
      for (int i = 0; i < (int)count; ++i) MUST(IN(r)[i] == r * 1000 + round + first + i);
      MUST(IN(r)[count] == -1);
    }
#undef OUT
#undef IN
  }
}

static void repeats(void) {
  ncclComm_t comm = join();
  int32_t *src[kPlaces], *dst[kPlaces];
  for (int i = 0; i < kPlaces; ++i) {
    src[i] = malloc(kMost * sizeof(int32_t) + 64), dst[i] = malloc(kMost * sizeof(int32_t) + 64);
    src[i] += i, dst[i] += 2 * i; /* other alignments */
  }
  for (int round = 0; round < 12; ++round) {
    repeat_collectives(comm, round, src[round % kPlaces], dst[(round + 1) % kPlaces]);
    repeat_messages(comm, round, src[(round + 1) % kPlaces], dst[round % kPlaces]);
    repeat_a_round(comm, round, src[(round + 1) % kPlaces], dst[round % kPlaces]);
  }
  for (int count = 1; count <= 1100; ++count) { /* more forms than are kept */
    int32_t one[1100], total[1100];
    for (int i = 0; i < count; ++i) one[i] = i;
    OK(ncclAllReduce(one, total, (size_t)count, ncclInt32, ncclSum, comm, NULL));
    MUST(total[count - 1] == ranks * (count - 1));
  }
  repeat_collectives(comm, 12, src[0], dst[0]);
  repeat_messages(comm, 12, src[0], dst[0]);
  OK(ncclCommDestroy(comm));
}

static void transfers(void) {
  ncclComm_t comm = join();
  const size_t most = 700001;
  float* out = malloc(most * 4);
  float* in = malloc(most * 4 * (size_t)ranks);
  const int next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
  const size_t counts[] = {1, 1000, 700001};
  for (int c = 0; c < 3; ++c) {
    const size_t count = counts[c];
    for (size_t i = 0; i < count; ++i) out[i] = (float)(rank * 10 + (int)(i % 7));
    /* Around the ring at once. */
    OK(ncclGroupStart());
    OK(ncclSend(out, count, ncclFloat32, next, comm, NULL));
    OK(ncclRecv(in, count, ncclFloat32, previous, comm, NULL));
    OK(ncclGroupEnd());
    for (size_t i = 0; i < count; ++i) MUST(in[i] == (float)(previous * 10 + (int)(i % 7)));
    /* Everybody to everybody, itself included, receives first; the count differs by pair. */
    OK(ncclGroupStart());
    for (int r = 0; r < ranks; ++r)
      OK(ncclRecv(in + (size_t)r * most, count / (size_t)(1 + (r + rank) % 3), ncclFloat32, r, comm, NULL));
    OK(ncclGroupStart());
    for (int r = 0; r < ranks; ++r)
      OK(ncclSend(out, count / (size_t)(1 + (r + rank) % 3), ncclFloat32, r, comm, NULL));
    OK(ncclGroupEnd());
    OK(ncclGroupEnd());
    for (int r = 0; r < ranks; ++r)
      for (size_t i = 0; i < count / (size_t)(1 + (r + rank) % 3); ++i)
        MUST(in[(size_t)r * most + i] == (float)(r * 10 + (int)(i % 7)));
  }
  /* Several messages between two ranks: grouped on one side, one by one on the other, bytes at odd addresses.
   */
  char bytes[3][301];
  if (rank == 0) {
    for (int i = 0; i < 3; ++i) memset(bytes[i], 'a' + i, sizeof bytes[i]);
    OK(ncclGroupStart());
    for (int i = 0; i < 3; ++i) OK(ncclSend(bytes[i] + 1, 300, ncclInt8, 1, comm, NULL));
    OK(ncclGroupEnd());
  } else if (rank == 1) {
    memset(bytes, 0, sizeof bytes);
    for (int i = 0; i < 3; ++i) OK(ncclRecv(bytes[i] + 1, 300, ncclInt8, 0, comm, NULL));
    for (int i = 0; i < 3; ++i) MUST(bytes[i][0] == 0 && bytes[i][1] == 'a' + i && bytes[i][300] == 'a' + i);
  }
  /* A collective and a transfer in one group. */
  float one = 1, total = 0;
  OK(ncclGroupStart());
  OK(ncclSend(out, 3, ncclFloat32, next, comm, NULL));
  OK(ncclAllReduce(&one, &total, 1, ncclFloat32, ncclSum, comm, NULL));
  OK(ncclRecv(in, 3, ncclFloat32, previous, comm, NULL));
  OK(ncclGroupEnd());
  MUST(total == (float)ranks && in[0] == (float)(previous * 10));
  /* Sizes of their own. */
  size_t src_counts[16], src_places[16], dst_counts[16], dst_places[16], at = 0, came = 0;
  for (int r = 0; r < ranks; ++r) {
    src_counts[r] = (size_t)(rank * r + r), dst_counts[r] = (size_t)(r * rank + rank);
    src_places[r] = at, dst_places[r] = came;
    at += src_counts[r], came += dst_counts[r];
  }
  for (int r = 0; r < ranks; ++r)
    for (size_t i = 0; i < src_counts[r]; ++i) out[src_places[r] + i] = (float)(rank * 100 + r);
  OK(ncclAllToAllv(out, src_counts, src_places, in, dst_counts, dst_places, ncclFloat32, comm, NULL));
  for (int r = 0; r < ranks; ++r)
    for (size_t i = 0; i < dst_counts[r]; ++i) MUST(in[dst_places[r] + i] == (float)(r * 100 + rank));
  free(out), free(in);
  OK(ncclCommDestroy(comm));
}

static void splits(void) {
  ncclComm_t comm = join(), half = NULL, none = (ncclComm_t)&comm, again = NULL;
  /* Keys turn the order of ranks around. */
  OK(ncclCommSplit(comm, rank % 2, -rank, &half, NULL));
  int count = 0, mine = -1, device = -1;
  OK(ncclCommCount(half, &count));
  OK(ncclCommUserRank(half, &mine));
  OK(ncclCommCuDevice(half, &device));
  const int members = (ranks + 1 - rank % 2) / 2;
  MUST(count == members && mine == members - 1 - rank / 2 && device == 0);
  int one = rank, sum = 0, wanted = 0;
  OK(ncclAllReduce(&one, &sum, 1, ncclInt32, ncclSum, half, NULL));
  for (int r = rank % 2; r < ranks; r += 2) wanted += r;
  MUST(sum == wanted);
  OK(ncclCommSplit(comm, rank == 0 ? NCCL_SPLIT_NOCOLOR : 3, 0, &none, NULL));
  MUST((none == NULL) == (rank == 0));
  if (none) {
    OK(ncclAllReduce(&one, &sum, 1, ncclInt32, ncclSum, none, NULL));
    MUST(sum == ranks * (ranks - 1) / 2);
    OK(ncclCommDestroy(none));
  }
  OK(ncclCommSplit(half, 0, mine, &again, NULL)); /* of a split */
  OK(ncclAllReduce(&one, &sum, 1, ncclInt32, ncclSum, again, NULL));
  MUST(sum == wanted);
  OK(ncclCommDestroy(again));
  OK(ncclCommDestroy(half));
  OK(ncclAllReduce(&one, &sum, 1, ncclInt32, ncclSum, comm, NULL));
  MUST(sum == ranks * (ranks - 1) / 2);
  OK(ncclCommDestroy(comm));
}

/* An operator may be let go before the group that uses it ends. */
static void old_operator(ncclComm_t comm) {
  int three = 3, x = rank, sum = -1;
  ncclRedOp_t op;
  OK(ncclGroupStart());
  OK(ncclRedOpCreatePreMulSum(&op, &three, ncclInt32, ncclScalarHostImmediate, comm));
  OK(ncclAllReduce(&x, &sum, 1, ncclInt32, op, comm, NULL));
  OK(ncclRedOpDestroy(op, comm));
  OK(ncclGroupEnd());
  MUST(sum == 3 * ranks * (ranks - 1) / 2);
  MUST(ncclRedOpDestroy(op, comm) == ncclInvalidArgument);
}

/* Nothing of a group runs in which a call was refused, and its end says so. */
static void refused_group(ncclComm_t comm) {
  int x = 1, sum = -1;
  OK(ncclGroupStart());
  OK(ncclAllReduce(&x, &sum, 1, ncclInt32, ncclSum, comm, NULL));
  MUST(ncclBroadcast(&x, &x, 1, ncclInt32, ranks, comm, NULL) == ncclInvalidArgument);
  MUST(ncclGroupEnd() == ncclInvalidArgument && sum == -1);
  OK(ncclAllReduce(&x, &sum, 1, ncclInt32, ncclSum, comm, NULL));
  MUST(sum == ranks);
}

/* What a rank sends itself is as long as what it takes, or nothing is written. */
static void unequal_to_itself(ncclComm_t comm) {
  int out[4] = {1, 2, 3, 4}, in[4] = {-1, -1, -1, -1};
  OK(ncclGroupStart());
  OK(ncclSend(out, 4, ncclInt32, rank, comm, NULL));
  OK(ncclRecv(in, 2, ncclInt32, rank, comm, NULL));
  MUST(ncclGroupEnd() == ncclInvalidArgument && in[0] == -1 && in[3] == -1);
  MUST(strstr(ncclGetLastError(comm), "to itself: got 4 elements of type 2 and 2 of type 2"));
  size_t counts[16] = {0}, places[16] = {0};
  counts[rank] = 1;
  MUST(ncclAllToAllv(NULL, counts, places, in, counts, places, ncclInt32, comm, NULL) == ncclInvalidArgument);
}

/* Rows and columns of one communicator, made in one group. */
static void splits_in_a_group(ncclComm_t comm) {
  for (int round = 0; round < 10; ++round) {
    ncclComm_t row, column, whole;
    OK(ncclGroupStart());
    OK(ncclCommSplit(comm, rank / 2, rank, &row, NULL));
    OK(ncclCommSplit(comm, rank % 2, rank, &column, NULL));
    OK(ncclCommSplit(comm, 0, -rank, &whole, NULL));
    OK(ncclGroupEnd());
    int of_row = 0, of_column = 0, of_whole = 0, mine = -1, sum = 0;
    OK(ncclCommCount(row, &of_row));
    OK(ncclCommCount(column, &of_column));
    OK(ncclCommCount(whole, &of_whole));
    OK(ncclCommUserRank(whole, &mine));
    MUST(of_row == (rank / 2 * 2 + 1 < ranks ? 2 : 1) && of_column == (ranks + 1 - rank % 2) / 2);
    MUST(of_whole == ranks && mine == ranks - 1 - rank);
    OK(ncclAllReduce(&rank, &sum, 1, ncclInt32, ncclSum, row, NULL));
    MUST(sum == (of_row == 2 ? rank / 2 * 4 + 1 : rank));
    OK(ncclCommDestroy(row));
    OK(ncclCommDestroy(column));
    OK(ncclCommDestroy(whole));
  }
}

static void groups(void) {
  ncclComm_t comm = join();
  old_operator(comm);
  refused_group(comm);
  unequal_to_itself(comm);
  splits_in_a_group(comm);
  OK(ncclCommDestroy(comm));
}

/* From nccl_device.h, which Weft has no part in. */
typedef struct {
  int nRanks, rank, stride;
} ncclTeam_t;
ncclResult_t ncclCommQueryProperties(ncclComm_t comm, void* properties);
ncclResult_t ncclDevCommCreate(ncclComm_t comm, const void* requirements, void* made);
ncclResult_t ncclLsaBarrierCreateRequirement(ncclTeam_t team, int barriers, void* handle, void* requirement);
ncclResult_t ncclGetLsaDevicePointer(ncclWindow_t window, size_t offset, int peer, void** out);
ncclResult_t ncclParamBind(ncclParamHandle_t* out, const char* key);
ncclResult_t ncclParamGetI32(ncclParamHandle_t handle, int32_t* out);
int ncclLLA2ACalcSlots(int elements, int element_bytes);
ncclTeam_t ncclTeamWorld(ncclComm_t comm);
ncclTeam_t ncclTeamLsa(ncclComm_t comm);
int ncclTeamRankToWorld(ncclComm_t comm, ncclTeam_t team, int of_rank);

/* What only the real library could do. Every failure leaves its own words. */
static void lacks(ncclComm_t comm) {
  char bytes[256] = {0};
  void* address = NULL;
  ncclParamHandle_t parameter = NULL;
  int32_t number = 0;
  const ncclTeam_t team = {ranks, rank, 1};
#define LACKS(function, comm_, call, failed) \
  MUST((call) == (failed) && strstr(ncclGetLastError(comm_), #function " needs the real NCCL"))
#define LACKS_RESULT(function, comm_, ...) \
  LACKS(function, comm_, function(__VA_ARGS__), ncclInvalidUsage)
  LACKS_RESULT(ncclPutSignal, comm, bytes, 1, ncclFloat32, 0, NULL, 0, 0, 0, 0, comm, NULL);
  LACKS_RESULT(ncclCommSuspend, comm, comm, 0);
  LACKS_RESULT(ncclCommQueryProperties, comm, comm, bytes);
  LACKS_RESULT(ncclDevCommCreate, comm, comm, bytes, bytes);
  LACKS(ncclTeamWorld, comm, ncclTeamWorld(comm).nRanks, 0);
  LACKS(ncclTeamRankToWorld, comm, ncclTeamRankToWorld(comm, team, 0), -1);
  LACKS_RESULT(ncclLsaBarrierCreateRequirement, NULL, team, 1, bytes, bytes);
  LACKS_RESULT(ncclGetLsaDevicePointer, NULL, NULL, 0, 0, &address);
  LACKS_RESULT(ncclParamBind, NULL, &parameter, "X");
  LACKS_RESULT(ncclParamGetI32, NULL, parameter, &number);
  LACKS(ncclLLA2ACalcSlots, NULL, ncclLLA2ACalcSlots(1, 1), -1);
#undef LACKS_RESULT
#undef LACKS
  MUST(ncclDevCommCreate(NULL, bytes, bytes) == ncclInvalidArgument);
  MUST(strstr(ncclGetLastError(NULL), "ncclDevCommCreate: comm: got null"));
}

/* The real library (nccl_real.c) does what Weft has no part in, with its own communicators, too: it may reach this
 * library's functions by their names. */
static void real_library(void) {
  struct {
    uint64_t magic;
    int rank;
  } theirs = {0xfeed, 2};
  ncclComm_t comm = (ncclComm_t)&theirs;
  const ncclTeam_t team = ncclTeamLsa(comm);
  MUST(team.nRanks == 6 && team.rank == 2 && team.stride == 3);
  MUST(ncclTeamRankToWorld(comm, team, 1) == 6 + 2 + 3 + 1);
  ncclTeam_t written = {0, 0, 0};
  OK(ncclLsaBarrierCreateRequirement(team, 7, NULL, &written));
  MUST(written.nRanks == 6 && written.rank == 7 && written.stride == 3);
  int32_t number = 0;
  OK(ncclParamGetI32(NULL, &number));
  MUST(number == 17);
  for (int turn = 0; turn < 2; ++turn) { /* what is collective in one group, for ranks of this thread */
    int made[2] = {0, 0};
    ncclWindow_t window = NULL;
    OK(ncclGroupStart());
    OK(ncclGroupStart());
    for (int i = 0; i < 2; ++i) OK(ncclDevCommCreate(comm, NULL, &made[i]));
    OK(ncclCommWindowRegister(comm, &number, 4, &window, NCCL_WIN_COLL_SYMMETRIC));
    OK(ncclGroupEnd());
    MUST(made[0] == 0);
    OK(ncclGroupEnd());
    MUST(made[0] == 3 && made[1] == 3 && window);
  }
  MUST(ncclDevCommCreate(comm, NULL, &number) == ncclInvalidUsage); /* outside of a group it would wait */
  OK(ncclGroupStart());
  OK(ncclDevCommCreate(comm, NULL, &number));
  OK(ncclGroupSimulateEnd(NULL));
  MUST(ncclDevCommCreate(comm, NULL, &number) == ncclInvalidUsage);
}

static void errors(void) {
  int version = 0;
  OK(ncclGetVersion(&version));
  MUST(version >= 22000);
  ncclUniqueId strange;
  memset(&strange, 1, sizeof strange);
  ncclComm_t comm = NULL;
  MUST(ncclCommInitRank(&comm, 2, strange, 0) == ncclInvalidArgument && comm == NULL);
  MUST(strstr(ncclGetLastError(NULL), "commId"));
  MUST(ncclCommInitRank(&comm, 2, strange, 2) == ncclInvalidArgument);
  comm = join();
  float x[4] = {0};
  MUST(ncclAllReduce(x, x, 4, (ncclDataType_t)12, ncclSum, comm, NULL) == ncclInvalidArgument);
  MUST(strstr(ncclGetLastError(comm), "datatype: got 12"));
  MUST(ncclAllReduce(x, x, 4, ncclFloat32, (ncclRedOp_t)77, comm, NULL) == ncclInvalidArgument);
  MUST(ncclAllReduce(NULL, x, 4, ncclFloat32, ncclSum, comm, NULL) == ncclInvalidArgument);
  MUST(ncclAllReduce(x, x, 4, ncclFloat32, ncclSum, NULL, NULL) == ncclInvalidArgument);
  MUST(ncclBroadcast(x, x, 4, ncclFloat32, ranks, comm, NULL) == ncclInvalidArgument);
  MUST(strstr(ncclGetLastError(comm), "allowed: 0 to"));
  MUST(ncclSend(x, 4, ncclFloat32, rank, comm, NULL) == ncclInvalidUsage);
  MUST(ncclGroupEnd() == ncclInvalidUsage);
  lacks(comm);
  MUST(!strcmp(ncclGetErrorString(ncclSuccess), "no error") && ncclGetErrorString((ncclResult_t)99));
  ncclResult_t state = ncclInternalError;
  OK(ncclCommGetAsyncError(comm, &state));
  MUST(state == ncclSuccess);
  void *memory = NULL, *handle = NULL, *back = NULL;
  ncclWindow_t window = NULL;
  OK(ncclMemAlloc(&memory, 100000));
  OK(ncclCommRegister(comm, memory, 100000, &handle));
  OK(ncclCommWindowRegister(comm, memory, 100000, &window, NCCL_WIN_COLL_SYMMETRIC));
  OK(ncclWinGetUserPtr(comm, window, &back));
  MUST(back == memory);
  OK(ncclAllGather(memory, memory, 0, ncclFloat32, comm, NULL));
  OK(ncclCommWindowDeregister(comm, window));
  OK(ncclCommDeregister(comm, handle));
  OK(ncclMemFree(memory));
  OK(ncclCommDestroy(comm));
  OK(ncclCommDestroy(NULL));
}

/* The last rank stays away; the others find out by their deadline (WEFT_TIMEOUT_S). */
static void lost(void) {
  ncclComm_t comm = join();
  float x = 1, y = 0;
  OK(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, comm, NULL));
  if (rank == ranks - 1) return;
  MUST(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, comm, NULL) == ncclRemoteError);
  MUST(strstr(ncclGetLastError(comm), "waited"));
  ncclResult_t state = ncclSuccess;
  OK(ncclCommGetAsyncError(comm, &state));
  MUST(state == ncclRemoteError);
  MUST(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, comm, NULL) == ncclRemoteError);
  OK(ncclCommAbort(comm));
}

/* Ranks call different things; each finds out by its deadline (WEFT_TIMEOUT_S), and gets no wrong number. */
static void differ(void) {
  ncclComm_t comm = join();
  double x[5] = {1, 1, 1, 1, 1}, y[5] = {-1, -1, -1, -1, -1};
  OK(ncclAllReduce(x, y, 5, ncclFloat64, ncclSum, comm, NULL));
  MUST(y[4] == ranks);
  y[0] = -1;
  MUST(ncclAllReduce(x, y, rank == 0 ? 4 : 5, ncclFloat64, ncclSum, comm, NULL) != ncclSuccess);
  MUST(strstr(ncclGetLastError(comm), "all_reduce of 4 float64 sum"));
  MUST(strstr(ncclGetLastError(comm), "all_reduce of 5 float64 sum"));
  MUST(ncclAllReduce(x, y, 5, ncclFloat64, ncclSum, comm, NULL) != ncclSuccess);
  ncclResult_t state = ncclSuccess;
  OK(ncclCommGetAsyncError(comm, &state));
  MUST(state != ncclSuccess);
  OK(ncclCommAbort(comm));
}

/* The same between two ranks: type and count of a message. */
static void messages_differ(void) {
  ncclComm_t comm = join();
  float x[4] = {1, 1, 1, 1}, y[4] = {-1, -1, -1, -1};
  if (rank == 0) OK(ncclSend(x, 4, ncclFloat32, 1, comm, NULL));
  if (rank == 1) {
    MUST(ncclRecv(y, 4, ncclInt32, 0, comm, NULL) != ncclSuccess);
    MUST(y[0] == -1);
    MUST(strstr(ncclGetLastError(comm), "rank 0 called send of 4 float32; rank 1 called recv of 4 int32"));
  }
  OK(ncclCommAbort(comm));
}

static void* abort_soon(void* comm) {
  usleep(300000);
  OK(ncclCommAbort(comm));
  return NULL;
}
/* One thread waits for a rank that never comes, another aborts; far before the deadline. */
static void aborts(void) {
  ncclComm_t comm = join();
  float x = 1, y = 0;
  OK(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, comm, NULL));
  if (rank == ranks - 1) {
    sleep(2);
    OK(ncclCommAbort(comm));
    return;
  }
  pthread_t thread;
  MUST(pthread_create(&thread, NULL, abort_soon, comm) == 0);
  MUST(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, comm, NULL) != ncclSuccess);
  pthread_join(thread, NULL);
}

/* One process, several communicators: as nccl-tests with -g. */
static void in_one_process(void) {
  enum { kComms = 3 };
  ncclComm_t comms[kComms], named[kComms];
  int devices[kComms] = {0, 0, 0};
  OK(ncclCommInitAll(comms, kComms, devices));
  float in[kComms][1000], out[kComms][1000];
  for (int repeat = 0; repeat < 3; ++repeat) {
    for (int c = 0; c < kComms; ++c)
      for (int i = 0; i < 1000; ++i) in[c][i] = (float)(c + i);
    OK(ncclGroupStart());
    for (int c = 0; c < kComms; ++c)
      OK(ncclAllReduce(in[c], out[c], 1000, ncclFloat32, ncclSum, comms[c], NULL));
    OK(ncclGroupEnd());
    for (int c = 0; c < kComms; ++c)
      for (int i = 0; i < 1000; ++i) MUST(out[c][i] == (float)(3 + 3 * i));
  }
  ncclUniqueId id;
  OK(ncclGetUniqueId(&id));
  OK(ncclGroupStart());
  for (int c = 0; c < kComms; ++c) OK(ncclCommInitRankScalable(&named[c], kComms, c, 1, &id, NULL));
  OK(ncclGroupEnd());
  for (int c = 0; c < kComms; ++c) {
    int mine = -1;
    OK(ncclCommUserRank(named[c], &mine));
    MUST(mine == c);
    OK(ncclCommDestroy(named[c]));
    OK(ncclCommDestroy(comms[c]));
  }
  OK(ncclCommInitAll(comms, 1, NULL));
  in[0][0] = 5;
  OK(ncclAllReduce(in[0], out[0], 1, ncclFloat32, ncclAvg, comms[0], NULL));
  MUST(out[0][0] == 5);
  OK(ncclGroupStart());
  OK(ncclSend(in[0], 10, ncclFloat32, 0, comms[0], NULL));
  OK(ncclRecv(out[0], 10, ncclFloat32, 0, comms[0], NULL));
  OK(ncclGroupEnd());
  MUST(memcmp(in[0], out[0], 40) == 0);
  OK(ncclCommDestroy(comms[0]));
}

/* One process, a thread for each share of the communicators, whose calls are its own: as nccl-tests with -t and -g. */
enum { kThreads = 3, kOfThread = 2, kInThreads = kThreads * kOfThread };
enum { kThreadElems = 70000, kThreadRounds = 60 };
static ncclComm_t in_threads_comms[kInThreads];
static ncclUniqueId in_threads_id;
static int is_born_in_threads;

static float value_in_round(int of_rank, int round, size_t at) {
  return (float)(of_rank + round + (int)(at % 5));
}

static void rounds_of_thread(int first, float** in, float** out) {
  for (int round = 0; round < kThreadRounds; ++round) {
    const ncclRedOp_t op = round % 2 ? ncclSum : ncclMax;
    const size_t count = 1 + (size_t)round * 9770 % kThreadElems;
    for (int g = 0; g < kOfThread; ++g)
      for (size_t i = 0; i < count; ++i) in[g][i] = value_in_round(first + g, round, i);
    OK(ncclGroupStart());
    for (int g = 0; g < kOfThread; ++g)
      OK(ncclAllReduce(in[g], out[g], count, ncclFloat32, op, in_threads_comms[first + g], NULL));
    OK(ncclGroupEnd());
    for (int g = 0; g < kOfThread; ++g)
      for (size_t i = 0; i < count; ++i) {
        const float most = value_in_round(kInThreads - 1, round, i);
        const float sum = kInThreads * (value_in_round(0, round, i) + most) / 2;
        MUST(out[g][i] == (op == ncclSum ? sum : most));
      }
    OK(ncclGroupStart());
    for (int g = 0; g < kOfThread; ++g) {
      const int mine = first + g, next = (mine + 1) % kInThreads, last = (mine + kInThreads - 1) % kInThreads;
      OK(ncclSend(in[g], count, ncclFloat32, next, in_threads_comms[mine], NULL));
      OK(ncclRecv(out[g], count, ncclFloat32, last, in_threads_comms[mine], NULL));
    }
    OK(ncclGroupEnd());
    for (int g = 0; g < kOfThread; ++g)
      for (size_t i = 0; i < count; ++i)
        MUST(out[g][i] == value_in_round((first + g + kInThreads - 1) % kInThreads, round, i));
  }
}

static void* share_of_thread(void* first_) {
  const int first = *(int*)first_;
  float *in[kOfThread], *out[kOfThread];
  if (is_born_in_threads) {
    OK(ncclGroupStart());
    for (int g = 0; g < kOfThread; ++g)
      OK(ncclCommInitRank(&in_threads_comms[first + g], kInThreads, in_threads_id, first + g));
    OK(ncclGroupEnd());
  }
  for (int g = 0; g < kOfThread; ++g) {
    in[g] = malloc(kThreadElems * sizeof(float));
    out[g] = malloc(kThreadElems * sizeof(float));
  }
  rounds_of_thread(first, in, out);
  for (int g = 0; g < kOfThread; ++g) {
    OK(ncclCommDestroy(in_threads_comms[first + g]));
    free(in[g]), free(out[g]);
  }
  return NULL;
}

static void in_threads(void) {
  for (is_born_in_threads = 0; is_born_in_threads < 2; ++is_born_in_threads) {
    pthread_t threads[kThreads];
    int first[kThreads];
    if (is_born_in_threads)
      OK(ncclGetUniqueId(&in_threads_id));
    else
      OK(ncclCommInitAll(in_threads_comms, kInThreads, NULL));
    for (int t = 0; t < kThreads; ++t) {
      first[t] = t * kOfThread;
      MUST(pthread_create(&threads[t], NULL, share_of_thread, &first[t]) == 0);
    }
    for (int t = 0; t < kThreads; ++t) MUST(pthread_join(threads[t], NULL) == 0);
  }
}

/* Large calls of one process: peers reach each other's buffers, which lie in no window. */
enum { kPeers = 3, kMostElems = 300000 };
static ncclComm_t peers[kPeers];
static float *sent[kPeers], *got[kPeers];

static float value_of(int peer, size_t at) {
  return (float)((peer + 1) * 1000 + at % 977);
}

static void fill_all(size_t elems) {
  for (int p = 0; p < kPeers; ++p)
    for (size_t i = 0; i < elems; ++i) {
      sent[p][i] = value_of(p, i);
      got[p][i] = -1;
    }
}

/* What rank p has at i after a call with `elems` a rank, and how many elements it has. */
typedef float (*Expected)(int p, size_t i, size_t elems);
static float sum_of_all(int p, size_t i, size_t elems) {
  (void)p, (void)elems;
  return value_of(0, i) + value_of(1, i) + value_of(2, i);
}
static float part_of_sum(int p, size_t i, size_t elems) {
  return sum_of_all(p, p * elems + i, elems);
}
static float gathered(int p, size_t i, size_t elems) {
  return (void)p, value_of((int)(i / elems), i % elems);
}
static float exchanged(int p, size_t i, size_t elems) {
  return value_of((int)(i / elems), p * elems + i % elems);
}
static int the_root;
static float of_root(int p, size_t i, size_t elems) { return (void)p, (void)elems, value_of(the_root, i); }
static float reduced_at_root(int p, size_t i, size_t elems) {
  return p == the_root ? sum_of_all(p, i, elems) : -1;
}
static float gathered_at_root(int p, size_t i, size_t elems) {
  return p == the_root ? gathered(p, i, elems) : -1;
}
static float scattered(int p, size_t i, size_t elems) { return value_of(the_root, p * elems + i); }
static float of_previous(int p, size_t i, size_t elems) {
  (void)elems;
  return value_of((p + kPeers - 1) % kPeers, i);
}

static void must_have(Expected expected, size_t elems, size_t count) {
  for (int p = 0; p < kPeers; ++p)
    for (size_t i = 0; i < count; ++i) MUST(got[p][i] == expected(p, i, elems));
}

static void in_one_process_large(void) {
  OK(ncclCommInitAll(peers, kPeers, NULL));
  for (int p = 0; p < kPeers; ++p) {
    sent[p] = malloc(kPeers * kMostElems * sizeof(float));
    got[p] = malloc(kPeers * kMostElems * sizeof(float));
  }
  const size_t sizes[] = {4096, 65536, 65539, kMostElems, 20480};
  for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; ++s) {
    const size_t n = sizes[s], all = n * kPeers;
#define EACH(call)                           \
  fill_all(all);                             \
  OK(ncclGroupStart());                      \
  for (int p = 0; p < kPeers; ++p) OK(call); \
  OK(ncclGroupEnd())
    EACH(ncclAllReduce(sent[p], got[p], n, ncclFloat32, ncclSum, peers[p], NULL));
    must_have(sum_of_all, n, n);
    EACH(ncclReduceScatter(sent[p], got[p], n, ncclFloat32, ncclSum, peers[p], NULL));
    must_have(part_of_sum, n, n);
    EACH(ncclAllGather(sent[p], got[p], n, ncclFloat32, peers[p], NULL));
    must_have(gathered, n, all);
    EACH(ncclAlltoAll(sent[p], got[p], n, ncclFloat32, peers[p], NULL));
    must_have(exchanged, n, all);
    for (the_root = 0; the_root < kPeers; ++the_root) {
      EACH(ncclBroadcast(sent[p], got[p], n, ncclFloat32, the_root, peers[p], NULL));
      must_have(of_root, n, n);
      EACH(ncclReduce(sent[p], got[p], n, ncclFloat32, ncclSum, the_root, peers[p], NULL));
      must_have(reduced_at_root, n, n);
      EACH(ncclGather(sent[p], got[p], n, ncclFloat32, the_root, peers[p], NULL));
      must_have(gathered_at_root, n, all);
      EACH(ncclScatter(sent[p], got[p], n, ncclFloat32, the_root, peers[p], NULL));
      must_have(scattered, n, n);
    }
    fill_all(all);
    OK(ncclGroupStart());
    for (int p = 0; p < kPeers; ++p) {
      OK(ncclSend(sent[p], n, ncclFloat32, (p + 1) % kPeers, peers[p], NULL));
      OK(ncclRecv(got[p], n, ncclFloat32, (p + kPeers - 1) % kPeers, peers[p], NULL));
    }
    OK(ncclGroupEnd());
    must_have(of_previous, n, n);
    for (int p = 0; p < kPeers; ++p) /* no call writes into its input */
      for (size_t i = 0; i < all; ++i) MUST(sent[p][i] == value_of(p, i));
#undef EACH
  }
  for (int p = 0; p < kPeers; ++p) OK(ncclCommDestroy(peers[p]));
}

/* What the ABI fixes. */
/* A forked child is no rank: every call on its parent's communicator is refused, and it ends by itself. */
static int is_refused(ncclResult_t result) {
  return result == ncclInvalidArgument && strstr(ncclGetLastError(NULL), "from which this process") != NULL;
}
static void sum_ranks(ncclComm_t comm) {
  float given = (float)(rank + 1), sum = 0;
  OK(ncclAllReduce(&given, &sum, 1, ncclFloat32, ncclSum, comm, NULL));
  MUST(sum == (float)(ranks * (ranks + 1) / 2));
}
static void forks(void) {
  ncclComm_t comm = join(), half;
  for (int ends = 0; ends < 2; ++ends) {
    sum_ranks(comm);
    pid_t child = fork();
    if (child == 0) {
      float one = 100;
      ncclResult_t error;
      MUST(is_refused(ncclAllReduce(&one, &one, 1, ncclFloat32, ncclSum, comm, NULL)));
      MUST(is_refused(ncclSend(&one, 1, ncclFloat32, (rank + 1) % ranks, comm, NULL)));
      OK(ncclGroupStart());
      MUST(is_refused(ncclBroadcast(&one, &one, 1, ncclFloat32, 0, comm, NULL)));
      MUST(ncclGroupEnd() == ncclInvalidArgument);
      MUST(is_refused(ncclCommSplit(comm, 0, 0, &half, NULL)));
      MUST(is_refused(ncclCommGetAsyncError(comm, &error)));
      MUST(is_refused(ncclCommFinalize(comm)));
      MUST(is_refused(ncclCommAbort(comm)));
      MUST(is_refused(ncclCommDestroy(comm)));
      if (ends) exit(0);
      _exit(0);
    }
    int status = 1;
    for (int tries = 0; waitpid(child, &status, WNOHANG) == 0; ++tries) {
      MUST(tries < 3000);
      usleep(10000);
    }
    MUST(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  sum_ranks(comm);
  OK(ncclCommSplit(comm, 0, rank, &half, NULL));
  sum_ranks(half);
  OK(ncclCommDestroy(half));
  OK(ncclCommDestroy(comm));
}

static void abi(void) {
  MUST(sizeof(ncclUniqueId) == 128 && sizeof(ncclConfig_t) == 96 && sizeof(ncclSimInfo_t) == 24);
  MUST(offsetof(ncclConfig_t, netName) == 32 && offsetof(ncclConfig_t, commName) == 48);
  MUST(ncclFloat8e5m2 == 11 && ncclAvg == 4 && sizeof(ncclRedOp_t) == 4);
}

int main(int count, char** arguments) {
  if (count != 5) return 2;
  rank = atoi(arguments[2]);
  ranks = atoi(arguments[3]);
  id_file = arguments[4];
  const struct {
    const char* name;
    void (*run)(void);
  } tests[] = {{"collectives", collectives},
               {"forks", forks},
               {"operators", operators},
               {"transfers", transfers},
               {"repeats", repeats},
               {"splits", splits},
               {"groups", groups},
               {"errors", errors},
               {"real_library", real_library},
               {"lost", lost},
               {"differ", differ},
               {"messages_differ", messages_differ},
               {"aborts", aborts},
               {"in_one_process", in_one_process},
               {"in_threads", in_threads},
               {"in_one_process_large", in_one_process_large},
               {"abi", abi}};
  for (size_t i = 0; i < sizeof tests / sizeof tests[0]; ++i)
    if (!strcmp(tests[i].name, arguments[1])) return tests[i].run(), 0;
  return 2;
}

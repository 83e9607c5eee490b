// What the tests of bad weather preload into a run's processes (LD_PRELOAD): a wall clock that is off, a disk that fails
// or is slow. All of them share one page, so that a change in it counts in each at once; see weather.py.
//
// The wall clock is what libc tells: clock_gettime, gettimeofday, time. A wait until a wall time is translated back for
// the kernel. Monotonic clocks stay true. Files count by their path: what lies below MUSTER_WEATHER_DISK.
//
// MUSTER_WEATHER_SYNCED names a file that gets the inode and the size of each file that has reached the disk.

#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

namespace {

struct Weather {
    volatile int64_t ahead_ns;   // of the wall clock
    volatile int32_t disk_errno; // every write and fsync fails with it; 0: none does
    volatile int32_t fsync_ms;   // each takes so long
};

Weather fair;
Weather *weather = &fair;
char disk[PATH_MAX];
constexpr int64_t second = 1000000000;

__attribute__((constructor)) void look() {
    if (const char *folder = getenv("MUSTER_WEATHER_DISK")) snprintf(disk, sizeof disk, "%s", folder);
    const char *path = getenv("MUSTER_WEATHER");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *page = mmap(nullptr, sizeof(Weather), PROT_READ, MAP_SHARED, fd, 0);
    if (page != MAP_FAILED) weather = static_cast<Weather *>(page);
    close(fd);
}

bool on_the_disk(int fd) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    return disk[0] && length > 0 && !strncmp(path, disk, strlen(disk));
}

bool fails(int fd) {
    if (!weather->disk_errno || !on_the_disk(fd)) return false;
    errno = weather->disk_errno;
    return true;
}

void record(int fd) {
    struct stat of;
    const char *synced = getenv("MUSTER_WEATHER_SYNCED");
    if (!synced || fstat(fd, &of) || !S_ISREG(of.st_mode)) return;
    int log = syscall(SYS_openat, AT_FDCWD, synced, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (log < 0) return;
    char line[64];
    int length = snprintf(line, sizeof line, "%lu %ld\n", (unsigned long)of.st_ino, (long)of.st_size);
    syscall(SYS_write, log, line, length); // one call: lines of two processes do not mix
    close(log);
}

void shift(timespec *at, int64_t by) {
    int64_t ns = at->tv_sec * second + at->tv_nsec + by;
    at->tv_sec = ns / second;
    at->tv_nsec = ns % second;
}

} // namespace

extern "C" {

int clock_gettime(clockid_t clock, timespec *at) noexcept {
    if (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE) {
        static auto real = reinterpret_cast<int (*)(clockid_t, timespec *)>(dlsym(RTLD_NEXT, "clock_gettime"));
        return real ? real(clock, at) : syscall(SYS_clock_gettime, clock, at);
    }
    int code = syscall(SYS_clock_gettime, clock, at);
    if (code == 0) shift(at, weather->ahead_ns);
    return code;
}

int gettimeofday(timeval *at, void *) noexcept {
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) noexcept {
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const timespec *until) {
    using Wait = int (*)(pthread_cond_t *, pthread_mutex_t *, const timespec *);
    static auto real = reinterpret_cast<Wait>(dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2"));
    timespec at = *until;
    if (at.tv_sec > 1000000000) shift(&at, -weather->ahead_ns); // else a condition that waits by the monotonic clock
    return real(condition, mutex, &at);
}

ssize_t write(int fd, const void *data, size_t size) {
    if (fails(fd)) return -1;
    return syscall(SYS_write, fd, data, size);
}

int fsync(int fd) {
    if (fails(fd)) return -1;
    if (weather->fsync_ms && on_the_disk(fd)) usleep(1000 * weather->fsync_ms);
    int result = syscall(SYS_fsync, fd), error = errno;
    if (!result) record(fd);
    errno = error;
    return result;
}

} // extern "C"

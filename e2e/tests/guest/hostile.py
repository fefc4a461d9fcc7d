# What a hostile guest's root tries. Answers lines of its input (`N reach ADDRESS:PORT...`, `N anything`, `N fragments`), or
# with `for ever` tries those addresses and names over and over until there is a file `stop`.
#
# Each UDP datagram that no ordinary program sends is for a port from 5000 on, so that whoever listens knows what it was.
import os
import select
import socket
import struct
import sys
import time

US, GATEWAY = bytes.fromhex("027065706f02"), bytes.fromhex("027065706f01")
OWN, SERVER, SLOT = "192.0.0.2", "8.0.0.1", "244.0.0.1"
wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
wire.bind(("eth0", 0))


def total(data):
    data += b"\0" * (len(data) % 2)
    t = sum(struct.unpack(">%dH" % (len(data) // 2), data))
    t = (t >> 16) + (t & 65535)
    return ~(t + (t >> 16)) & 65535


def ip(body, to=SERVER, source=OWN, protocol=17, ttl=64, fragment=0, options=b"", number=1, version=4):
    options += b"\0" * (-len(options) % 4)
    words = 5 + len(options) // 4
    head = struct.pack(">BBHHHBBH4s4s", version << 4 | words, 0, words * 4 + len(body), number, fragment, ttl, protocol, 0,
                       socket.inet_aton(source), socket.inet_aton(to)) + options
    return head[:10] + struct.pack(">H", total(head)) + head[12:] + body


def udp(port, text=b"strange", source=9):
    return struct.pack(">HHHH", source, port, 8 + len(text), 0) + text


def send(packet, kind=b"\x08\x00", to=GATEWAY, source=US):
    try:
        wire.send(to + source + kind + packet)
    except OSError as error:
        print("not sent:", error, file=sys.stderr)


def anything():
    for protocol in (0, 2, 3, 4, 41, 46, 47, 50, 51, 89, 94, 103, 115, 132, 136, 137, 254, 255):
        send(ip(ip(udp(5000)), protocol=protocol))
    address = socket.inet_aton
    for to in ("192.0.0.1", SERVER):
        for closed in ("10.9.9.9", "169.254.169.254", SERVER):
            # Loose and strict source routes.
            for kind in (131, 137):
                send(ip(udp(5001), to=to, options=bytes([kind, 11, 4]) + address(closed) + address("10.9.9.9")))
    for source in ("8.0.0.9", "8.0.0.2", "127.0.0.1", "192.0.0.1", "192.0.0.3", "192.0.0.6", SLOT, "0.0.0.0", "255.255.255.255",
                   "224.0.0.1", "10.9.9.9"):
        send(ip(udp(5002), source=source))
    for to in ("127.0.0.1", "192.0.0.1", "192.0.0.6", "8.0.0.255", "8.0.0.0", "224.0.0.1", "239.255.255.250", "255.255.255.255",
               "0.0.0.0", SLOT, "10.9.9.9", "169.254.169.254", "168.63.129.16"):
        send(ip(udp(5003), to=to))
    inner = ip(udp(5004))
    vlan = b"\x00\x05\x08\x00"
    for kind, packet in ((b"\x81\x00", vlan + inner), (b"\x81\x00", b"\0\0\x08\0" + inner), (b"\x88\xa8", vlan + inner),
                         (b"\x81\x00", b"\0\5\x81\0" + vlan + inner), (b"\x88\x47", b"\0\0\x11\x40" + inner),
                         (b"\x88\x64", b"\x11\0\0\1" + struct.pack(">H", len(inner) + 2) + b"\0\x21" + inner),
                         (struct.pack(">H", len(inner)), inner), (b"\x08\x06", bytes(28)), (b"\x86\xdd", b"\x60" + bytes(59))):
        send(packet, kind)
        send(packet, kind, to=b"\xff" * 6)
    send(inner, to=b"\xff" * 6)
    send(inner, to=bytes.fromhex("01005e000001"))
    send(inner, source=bytes.fromhex("020000000009"))
    send(ip(udp(5005), version=6))
    send(ip(udp(5005), version=5))
    send(ip(udp(5005))[:19])
    send(b"")
    for kind in (0, 3, 4, 5, 9, 10, 11, 12, 13, 14, 15, 17, 18, 40):
        head = struct.pack(">BBHHH", kind, 0, 0, 7, 1) + inner[:28]
        send(ip(head[:2] + struct.pack(">H", total(head)) + head[4:], protocol=1))


def fragments():
    # Of a datagram to a port that is open: pieces that say another port, over the first one or before it.
    data = udp(4000, b"x" * 56)
    other = udp(5006, b"x" * 56)
    more = 0x2000
    for number, pieces in enumerate([
        [(data[:32], more), (other[:32], more), (data[32:], 4)],
        [(data[32:], 4), (other[:32], more), (data[:32], more)],
        [(data[:8], more), (other[:16], more), (data[8:], 1)],
        [(other[:32], more), (data[32:], 4)],
        [(data[8:], 1), (other[:8], more)],
        [(other[:24], more), (other[24:40], more | 3), (other[40:], 5)],
    ]):
        for body, fragment in pieces:
            send(ip(body, number=100 + number, fragment=fragment))
    # One that would end beyond the longest packet there is.
    send(ip(bytes(1000), number=200, fragment=8191))


def reached(targets, seconds):
    tried = {}
    for word in targets:
        target = (word.split(":")[0], int(word.split(":")[1]))
        s = socket.socket()
        s.setblocking(False)
        try:
            s.connect(target)
        except BlockingIOError:
            pass
        except OSError:
            continue
        tried[s] = target
    there, end = set(), time.monotonic() + seconds
    while tried and time.monotonic() < end:
        for s in select.select([], list(tried), [], max(0.0, end - time.monotonic()))[1]:
            target = tried.pop(s)
            if s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                there.add("%s:%d" % target)
            s.close()
    for s in tried:
        s.close()
    return there


def ask(name):
    asked = b"".join(bytes([len(l)]) + l.encode() for l in name.split(".")) + b"\0\0\1\0\1"
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for to in ("192.0.0.1", "9.1.1.1"):
        try:
            s.sendto(struct.pack(">6H", 7, 256, 1, 0, 0, 0) + asked, (to, 53))
        except OSError:
            pass
    s.close()


def for_ever(targets, names):
    rounds, ever = 0, set()
    while not os.path.exists("stop"):
        rounds += 1
        for name in names:
            ask(name)
        ever |= reached(targets, 0.5)
    print(rounds, *sorted(ever))


print("ready", flush=True)
if len(sys.argv) > 1:
    for_ever([word for word in sys.argv[2:] if ":" in word], [word for word in sys.argv[2:] if ":" not in word])
else:
    for line in sys.stdin:
        number, what, *words = line.split()
        if what == "reach":
            said = " ".join(sorted(reached(words, 3.0)))
        else:
            {"anything": anything, "fragments": fragments}[what]()
            said = "sent"
        print("%s is %s." % (number, said), flush=True)

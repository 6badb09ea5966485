-- This text is put before every script. KEYS[1] is the prefix of all keys of one model, with the model's hash tag.
-- All times are of Redis' own clock, so no other machine's clock affects a decision.
local PREFIX = KEYS[1]
local PLACEMENT = PREFIX .. 'placement'    -- hash: version, blocks
local SERVERS = PREFIX .. 'servers'        -- hash: server id -> address, newline, serialised PlacedServer without state and load
local ADDRESSES = PREFIX .. 'addresses'    -- hash: address -> server id
local CHANGES = PREFIX .. 'changes'        -- stream: an entry for each change of the version
local SESSIONS = PREFIX .. 'sessions'      -- sorted set: session id by the millisecond at which it expires
local LEASES = PREFIX .. 'leases'          -- hash: server id -> one digit, its state, then serialised PlacedServer with only state and load
local WORKLOADS = PREFIX .. 'workloads'    -- hash: server id -> the workload that registered it, if authenticated
local HEARD = PREFIX .. 'heard'            -- sorted set: server id by the millisecond of its last heartbeat
local LISTENING = PREFIX .. 'listening'    -- hash: since when routers have listened for heartbeats without a gap, and when a router last did
local STORE_ID = PREFIX .. 'store'          -- string: the id of this data set; Redis gets another one after it has lost its data
local ADAPTERS = PREFIX .. 'adapters'      -- hash: name -> 64 digits, its digest, then serialised RegisteredAdapter
local REMOVED_ADAPTERS = PREFIX .. 'removed_adapters' -- hash with a TTL: name, space, digest of a removed adapter -> 1
local ORDER = PREFIX .. 'order'            -- hash with a TTL: the ordered move: server, address, span, version
local PAUSE = PREFIX .. 'pause'            -- string with a TTL: while it exists, moves that only make the model faster must wait
local PATIENCE = PREFIX .. 'patience'      -- hash with a TTL: the last wait of such moves, and the servers at that time
local TAKERS = PREFIX .. 'takers'          -- sorted set with a TTL: client service by the millisecond of its last take
local ALL_SESSIONS = 'of all'             -- no session's id contains a space
local STATE, READY = 'state', 'ready'           -- kinds of changes
local EVERYONE = '\1'                     -- all tenants together, in place of a tenant, whose name can be printed
local OVERHEAD_BYTES = 1000                -- what Redis needs for a session next to its record and chain
local FORGOTTEN_AFTER_MS = 86400000        -- the time after which a model without servers is forgotten
local MOST_SESSION_TTL_MS = 2592000000
local MOST_ARGUMENTS = 1000                -- arguments of one command; Lua unpacks no more than some thousands
local MOST_EXPIRED = 256                   -- expired sessions that one call removes; the next calls remove the others
local MOST_REMOVED = 1024                  -- removed adapters that are remembered, so that servers learn of them
local REPEATED_WITHIN_MS = 30000           -- the time in which a call whose answer was lost is repeated

-- String with a TTL: two workloads said that they do not reach the server.
local function suspect_key(server_id) return PREFIX .. 'suspect:' .. server_id end
-- String with a TTL: the workload that said so last.
local function reporter_key(server_id) return PREFIX .. 'reporter:' .. server_id end
-- String with a TTL: why a server that reports to be ready is withheld: `leaving` or `unready`.
local function withheld_key(server_id) return PREFIX .. 'withheld:' .. server_id end
-- String with a TTL: chains through servers at this host were far slower than reported. It outlasts these servers.
local function doubted_key(address) return PREFIX .. 'doubted:' .. (string.match(address, '.*:') or '') end
-- String with a TTL: the id of the router that alone does a task.
local function lead_key(task) return PREFIX .. 'lead:' .. task end
-- Hash with a TTL: tenant, record, chain, epoch, the id of the last turn that ended, and of the last turn that wrote.
local function session_key(session_id) return PREFIX .. 'session:' .. session_id end
-- Sorted set with a TTL: the sessions of one tenant, by the millisecond at which they expire.
local function tenant_key(tenant) return tenant == EVERYONE and SESSIONS or PREFIX .. 'tenant:' .. tenant end
-- Hash with a TTL: session of one tenant -> its bytes, and ALL_SESSIONS -> their sum.
local function tenant_bytes_key(tenant) return PREFIX .. 'tenant_bytes:' .. tenant end
-- Hash with a TTL for one tenant: `level <quota>` and `since <quota>` of rates, `held <quota>` of what is in use.
local function quotas_key(tenant) return PREFIX .. 'quotas:' .. tenant end
-- Hash with a TTL: request of the tenant -> JSON with its use of each quota: `spent` of rates, `held` of the others.
local function quota_takes_key(tenant) return PREFIX .. 'quota_takes:' .. tenant end
-- Sorted set with a TTL: these requests, by the millisecond at which their lease ends.
local function quota_leases_key(tenant) return PREFIX .. 'quota_leases:' .. tenant end
-- The hash of a session that the call of this name has deleted.
local function deleted_key(call) return PREFIX .. 'deleted:' .. call end
-- String with a TTL: the id of the turn that holds the session.
local function turn_key(session_id) return PREFIX .. 'turn:' .. session_id end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Returns the version of the placement; 0 if it is missing or not a valid number.
local function version()
  local found = redis.call('HGET', PLACEMENT, 'version') or '0'
  local number = tonumber(found)
  if number and number >= 0 and number < 9000000000000000 and string.format('%.0f', number) == found then return found end
  return '0'
end

-- Raises the version. Versions start at the time in microseconds, so they keep growing after Redis has lost its data.
-- `kind` is STATE if spans and speeds stay as they are, and READY if a server became ready or none changed.
local function changed(server_id, kind)
  if version() == '0' then
    local time = redis.call('TIME')
    redis.call('HSET', PLACEMENT, 'version', time[1] .. string.format('%06d', time[2]))
  end
  redis.call('HINCRBY', PLACEMENT, 'version', 1)
  redis.call('XADD', CHANGES, 'MAXLEN', '~', 256, '*', 'server', server_id, 'kind', kind or 'span')
  redis.call('PEXPIRE', PLACEMENT, FORGOTTEN_AFTER_MS)
  redis.call('PEXPIRE', CHANGES, FORGOTTEN_AFTER_MS)
end

local function last_change()
  local last = redis.call('XREVRANGE', CHANGES, '+', '-', 'COUNT', 1)
  return last[1] and last[1][1] or '0-0'
end

-- Returns the entries of the changes after one version, each with a server's id and a kind; or false, if they are not
-- known. Each change has an entry, so none is missing if the version's own entry is still there and the number is right.
local function changes_since(change, its_version)
  local entries = redis.call('XRANGE', CHANGES, change, '+')
  if #entries == 0 or entries[1][1] ~= change then return false end
  if #entries - 1 ~= tonumber(version()) - tonumber(its_version) then return false end
  local changes = {}
  for index = 2, #entries do changes[index - 1] = {server_id = entries[index][2][2], kind = entries[index][2][4]} end
  return changes
end

-- Whether all changes after a version are known, and of these kinds.
local function only_changes_since(change, its_version, kinds)
  if version() == its_version then return true end
  for _, each in ipairs(changes_since(change, its_version) or {{}}) do
    if not kinds[each.kind or ''] then return false end
  end
  return true
end

-- The two parts of a server's entry. If it has no line feed, which no router writes, both are the whole entry.
local function address_of(entry) return string.sub(entry, 1, (string.find(entry, '\n', 1, true) or 0) - 1) end
local function description_of(entry) return string.sub(entry, (string.find(entry, '\n', 1, true) or 0) + 1) end

-- Removes an adapter, and remembers it, so that its servers end sessions with it. The first write frees memory, so a
-- full Redis allows it.
local function take_out(name, entry)
  redis.call('HDEL', ADAPTERS, name)
  if redis.call('HLEN', REMOVED_ADAPTERS) >= MOST_REMOVED then redis.call('DEL', REMOVED_ADAPTERS) end
  redis.call('HSET', REMOVED_ADAPTERS, name .. ' ' .. string.sub(entry, 1, 64), 1)
  redis.call('PEXPIRE', REMOVED_ADAPTERS, FORGOTTEN_AFTER_MS)
end

-- Returns since when routers have listened for heartbeats. A server's silence counts only from then: not while all
-- routers were down, Redis was frozen, or Redis was too full to store a heartbeat. A change of the clock restarts it.
local function listening_since(lease_ms)
  local now = now_ms()
  local listened = redis.call('HMGET', LISTENING, 'since', 'last')
  local since, last = tonumber(listened[1]), tonumber(listened[2])
  if not since or not last or now < last or now - last > lease_ms / 2 then since = now end
  local noted = redis.pcall('HSET', LISTENING, 'since', string.format('%.0f', since), 'last', string.format('%.0f', now))
  if type(noted) == 'table' and noted.err then return now end
  return since
end

-- Stores a heartbeat.
local function hear(server_id, lease)
  redis.call('HSET', LEASES, server_id, lease)
  redis.call('ZADD', HEARD, string.format('%.0f', now_ms()), server_id)
end

-- Whether another workload registered the server. Without authentication, `workload` is empty, and the answer is false.
local function is_anothers(server_id, workload)
  local registered = redis.call('HGET', WORKLOADS, server_id)
  return workload ~= '' and registered and registered ~= workload
end

local function remove(server_id, entry)
  redis.call('DEL', suspect_key(server_id), reporter_key(server_id), withheld_key(server_id))
  redis.call('HDEL', SERVERS, server_id)
  redis.call('HDEL', LEASES, server_id)
  redis.call('HDEL', WORKLOADS, server_id)
  redis.call('ZREM', HEARD, server_id)
  local address = address_of(entry)
  if redis.call('HGET', ADDRESSES, address) == server_id then redis.call('HDEL', ADDRESSES, address) end
end

-- Returns the session's record if `tenant` owns it, else false.
local function owned(session_id, tenant)
  local fields = redis.call('HMGET', session_key(session_id), 'tenant', 'record')
  if fields[1] == tenant then return fields[2] end
  return false
end

local function store_id()
  local id = redis.call('GET', STORE_ID)
  if not id then
    local time = redis.call('TIME')
    id = time[1] .. '-' .. time[2]
    redis.call('SET', STORE_ID, id, 'PX', MOST_SESSION_TTL_MS)
  end
  return id
end

-- Sets the number of bytes of a session for its tenant, or for everyone.
local function count_bytes_of(session_id, tenant, num_bytes)
  local key = tenant_bytes_key(tenant)
  local before = tonumber(redis.call('HGET', key, session_id) or '0')
  redis.call('HINCRBY', key, ALL_SESSIONS, num_bytes - before)
  if num_bytes > 0 then redis.call('HSET', key, session_id, num_bytes) else redis.call('HDEL', key, session_id) end
end

-- Sets the number of bytes of a session of the tenant. A turn counts the bytes that it may add until it ends.
local function count_bytes(session_id, tenant, new_bytes)
  local key = session_key(session_id)
  local num_bytes = redis.call('HSTRLEN', key, 'record') + redis.call('HSTRLEN', key, 'chain')
  num_bytes = num_bytes + OVERHEAD_BYTES + (new_bytes or 0)
  count_bytes_of(session_id, tenant, num_bytes)
  count_bytes_of(session_id, EVERYONE, num_bytes)
end

-- Forgets a session that is no longer stored.
local function forget(session_id, tenant)
  for _, owner in ipairs({tenant, EVERYONE}) do
    count_bytes_of(session_id, owner, 0)
    redis.call('ZREM', tenant_key(owner), session_id)
  end
end

-- Returns the sessions of the tenant that have expired and are still counted.
local function expired_sessions(tenant, most)
  return redis.call('ZRANGEBYSCORE', tenant_key(tenant), '-inf', string.format('%.0f', now_ms()), 'LIMIT', 0, most)
end

-- Returns the bytes of the tenant's sessions, with those that have expired and are still counted.
local function counted_bytes(tenant)
  return tonumber(redis.call('HGET', tenant_bytes_key(tenant), ALL_SESSIONS) or '0')
end

-- Returns the bytes that the tenant has stored. It writes nothing, since it runs before the script's first write.
local function stored_bytes(tenant)
  local key = tenant_bytes_key(tenant)
  local sum = counted_bytes(tenant)
  local expired = expired_sessions(tenant, -1)
  for first = 1, #expired, MOST_ARGUMENTS do
    local last = math.min(first + MOST_ARGUMENTS - 1, #expired)
    for _, num_bytes in ipairs(redis.call('HMGET', key, unpack(expired, first, last))) do
      sum = sum - tonumber(num_bytes or '0')
    end
  end
  return sum
end

-- Returns a refusal if the tenant, or everyone together, has no room for this many more bytes. A bound of 0: any number.
local function refusal_of_bytes(tenant, new_bytes, most_bytes, most_of_everyone)
  local function is_over(owner, most)
    local function fits(stored) return stored < most and stored + new_bytes <= most end
    -- Expired sessions are looked up only if it depends on them.
    return most > 0 and not fits(counted_bytes(owner)) and not fits(stored_bytes(owner))
  end
  if is_over(tenant, most_bytes) then return {'quota', 'stored_session_bytes'} end
  if is_over(EVERYONE, most_of_everyone) then return {'full'} end
  return false
end

local function forget_expired(tenant)
  for _, id in ipairs(expired_sessions(tenant, MOST_EXPIRED)) do
    count_bytes_of(id, tenant, 0)
    redis.call('ZREM', tenant_key(tenant), id)
  end
end

local function keep(session_id, ttl_ms, new_bytes)
  local expires = string.format('%.0f', now_ms() + ttl_ms)
  redis.call('PEXPIREAT', session_key(session_id), expires)
  local tenant = redis.call('HGET', session_key(session_id), 'tenant') or ''
  count_bytes(session_id, tenant, new_bytes)
  for _, owner in ipairs({tenant, EVERYONE}) do
    local sessions = tenant_key(owner)
    redis.call('ZADD', sessions, expires, session_id)
    if redis.call('PTTL', sessions) < ttl_ms then redis.call('PEXPIREAT', sessions, expires) end
    redis.call('PEXPIRE', tenant_bytes_key(owner), redis.call('PTTL', sessions))
  end
  store_id()
  redis.call('PEXPIRE', STORE_ID, MOST_SESSION_TTL_MS)
end

-- Extends the session's time to live to that of a running turn.
local function keep_at_least(session_id, ttl_ms)
  if redis.call('PTTL', session_key(session_id)) < ttl_ms then keep(session_id, ttl_ms) end
end

local function found(session_id, record)
  local busy = redis.call('EXISTS', turn_key(session_id))
  local epoch = redis.call('HGET', session_key(session_id), 'epoch') or '0'
  return {'ok', record, busy, redis.call('PTTL', session_key(session_id)), epoch, store_id()}
end
